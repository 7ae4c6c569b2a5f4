"""Why a library that was built does not load, and what to do about it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ..machine.symbols import demangle

_LIBRARY = re.compile(r"TORCH_LIBRARY(?:_FRAGMENT)?\s*\(\s*(\w+)\s*,")
_DEFINITION = re.compile(r"\.def\(\s*((?:\"(?:[^\"\\\n]|\\.)*\"\s*)+)[,)]")
_LITERAL = re.compile(r"\"((?:[^\"\\\n]|\\.)*)\"")
_TWICE = re.compile(
    r"register the namespace|same name and the same overload|multiple times|already registered"
)
_CRASH = re.compile(r"SIGSEGV|SIGABRT|terminate called")


def advice(said: str, sources: Sequence[str]) -> str:
    """Explains ``said``, the message of a failed load, for these sources; may be empty."""
    texts = [_read(path) for path in sources]
    fixed = {name for text in texts for name in _LIBRARY.findall(text)} - {"TORCH_EXTENSION_NAME"}
    taken = sorted(fixed & registered_namespaces())
    if _TWICE.search(said) or (taken and _CRASH.search(said)):
        which = f" ({', '.join(taken)})" if taken else ""
        return (
            f"This process has another version of it loaded, and a name{which} can be registered "
            "only once. Use the macro TORCH_EXTENSION_NAME in place of the fixed name (in "
            "TORCH_LIBRARY or PYBIND11_MODULE): it is another one in each build. Otherwise start "
            "a new process."
        )
    missing = re.search(r"undefined symbol: (\S+)", said)
    if missing:
        return (
            f"{demangle(missing.group(1))} is declared and used, but no source of this module "
            "defines it. Name the file that does in sources, or its library in cxx_flags (-l...)."
        )
    if "failed to map segment" in said:
        return (
            "Its file system is most likely mounted with noexec. Set JITQUANT_CACHE_DIR to a "
            "directory on one that is not."
        )
    wrong = [line for text in texts for line in _wrong_schemas(text)]
    if wrong:
        return "An operator's schema is not valid:\n" + "\n".join(wrong)
    return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def registered_namespaces() -> set[str]:
    """The namespaces of all operators in this process."""
    import torch

    return {op.partition("::")[0] for op in torch._C._dispatch_get_all_op_names()}


def _wrong_schemas(text: str) -> list[str]:
    """torch's errors about the schemas in ``text``, which its stable ABI does not pass on."""
    import torch

    found: list[str] = []
    library = torch.library.Library(f"jitquant_schema_check_{os.urandom(6).hex()}", "DEF")  # type: ignore[no-untyped-call]
    for number, literals in enumerate(_DEFINITION.findall(text)):
        schema = "".join(_LITERAL.findall(literals))
        if "(" not in schema:
            continue
        arguments = schema[schema.index("(") :]
        try:
            # Under its own name, since two sources may well define the same.
            library.define(f"f{number}{arguments}")  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            reason = str(error).partition("\nException raised")[0].strip().splitlines()
            found.append(f"  {schema}\n    {reason[0] if reason else 'it cannot be read'}")
    return found
