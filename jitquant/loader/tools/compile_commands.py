"""``compile_commands.json``: the command for each source, for an editor's language server.

A C++ source has the command of its build, without flags that only GCC knows. A ``.cu`` has a
clang command, because clangd, which reads these files, does not know nvcc's options.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from ..compile.commands import FIRST, make_units
from ..machine.scratch import scratch
from ..machine.trust import write_output
from ..request.plan import Plan
from ..units import release

_LEFT_OUT = ("-fno-gnu-unique", f"-include{FIRST}")
_WITH_A_VALUE = ("-I", "-isystem", "-include", "-D", "-U")


def compile_commands(plans: Iterable[Plan]) -> list[dict[str, object]]:
    """The command of each source of ``plans``. Compiles nothing."""
    found: dict[str, dict[str, object]] = {}
    for plan in plans:
        with scratch("commands") as place:
            units = make_units(plan, plan.name, place)
        for unit in units:
            if unit.source not in plan.sources:
                continue  # a generated binding
            argv = list(unit.direct.argv)
            found[unit.source] = {
                "directory": os.path.dirname(unit.source),
                "file": unit.source,
                "arguments": (
                    _for_clang(plan, unit.source, argv)
                    if unit.is_cuda
                    else [flag for flag in argv if flag not in _LEFT_OUT]
                ),
            }
    return list(found.values())


def merge(path: Path, commands: Iterable[dict[str, object]]) -> int:
    """Write ``commands`` into the database at ``path``; those of other files in it stay.

    Returns how many it has then.
    """
    whole: dict[object, object] = {}
    if path.exists():
        try:
            whole = {item["file"]: item for item in json.loads(path.read_text(encoding="utf-8"))}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not a compilation database ({error}). Remove it, or give another file."
            ) from error
    whole |= {item["file"]: item for item in commands}
    write_output(path, json.dumps(list(whole.values()), indent=1) + "\n")
    return len(whole)


def _for_clang(plan: Plan, source: str, argv: list[str]) -> list[str]:
    """The command for clang: the macros, include directories and standard of nvcc's."""
    assert plan.nvcc is not None
    kept: list[str] = []
    rest = iter(argv)
    for flag in rest:
        if flag in _WITH_A_VALUE:
            kept += [flag, next(rest, "")]
        elif flag.startswith((*_WITH_A_VALUE, "-std=", "--std=")):
            kept.append(flag.replace("--std", "-std"))
    arch = plan.archs.archs[0].partition("+")[0]
    toolkit = os.path.dirname(os.path.dirname(plan.nvcc.path))
    # Without it clang takes a toolkit that is newer than itself for one older than <<<>>> is now.
    known = ".".join(map(str, release(plan.nvcc.version)))
    for directory in plan.nvcc.include_dirs:
        kept += ["-isystem", directory]
    return [
        *("clang++", "-x", "cuda", f"--cuda-gpu-arch=sm_{arch}", f"--cuda-path={toolkit}"),
        *("-Xclang", f"-target-sdk-version={known}", "-nocudalib", "-Wno-unknown-cuda-version"),
        *(*kept, "-c", source),
    ]
