"""What has changed since the last build of a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..machine.memo import Memo
from ..report import shorten
from ..request.plan import Wanted

#: What messages call the parts of a key.
LABELS = {
    "archs": "architectures",
    "nvcc": "nvcc",
    "launcher": "launcher of compilers",
    "cudart": "CUDA runtime",
    "host_compiler": "host compiler",
    "torch": "torch",
    "cuda_flags": "cuda_flags",
    "cxx_flags": "cxx_flags",
    "debug": "JITQUANT_DEBUG",
    "environment": "compiler variables",
    "libc": "C library",
    "schema": "cache format",
    "include_dirs": "include_dirs",
    "layout": "directories that are others too",
    "installed": "directories that are of an installation",
    "machine": "the machine",
    "cpu": "processor, which a flag with =native asks for",
    "binding_generator": "generator of bindings",
}


#: Characters of a value in one line of a message.
_MOST_SHOWN = 200


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        kind: ``"source"``, ``"header"``, or what it is: ``"nvcc"``, ``"architectures"``, ...
        name: the file, as headers are named in the cache; ``""`` for what is not a file.
        before, now: digests of a file, otherwise values; ``None`` if missing.
    """

    kind: str
    name: str
    before: str | None
    now: str | None


def changes_since(last: Mapping[str, Any] | None, plan: Wanted, memo: Memo) -> list[Change] | None:
    """What has changed since the last build of a module; ``None`` if there was none."""
    if last is None:
        return None
    inputs = plan.inputs
    before: dict[str, Any] = last.get("inputs", {})
    old_sources, new_sources = before.get("sources", []), inputs["sources"]
    gone = {name: digest for name, digest in old_sources if [name, digest] not in new_sources}
    came = {name: digest for name, digest in new_sources if [name, digest] not in old_sources}
    found = [Change("source", name, gone.get(name), came.get(name)) for name in {**gone, **came}]
    old_headers: dict[str, str] = last.get("headers", {})
    for name, digest in old_headers.items():
        path = plan.roots.path(name)
        state = memo.state(path) if path else None
        if state is None or state.digest != digest:
            found.append(Change("header", name, digest, state and state.digest))
    found += [
        Change(label, "", plain(before.get(key)), plain(inputs.get(key)))
        for key, label in LABELS.items()
        if before.get(key) != inputs.get(key)
    ]
    return found


def what_changed(changes: Sequence[Change] | None) -> str:
    """Why a build is needed, in one line; ``None`` if there was no build."""
    if changes is None:
        return "first build"
    files = [change.name for change in changes if change.name]
    reasons = [f"{shorten(files)} changed"] if files else []
    reasons += [f"{c.kind}: {_cut(c.before)} -> {_cut(c.now)}" for c in changes if not c.name]
    return "; ".join(reasons) if reasons else "not in the cache any more"


def _cut(value: str | None) -> str:
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def plain(value: Any) -> str:
    """A value of a key as a message shows it."""
    if isinstance(value, dict):
        value = [f"{key}={text}" for key, text in value.items()]
    if isinstance(value, list):
        return " ".join(map(plain, value)) or "none"
    return "none" if value is None else str(value)
