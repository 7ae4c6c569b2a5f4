"""What the compilers read, also if a launcher such as ccache restores an object instead."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import CompileError
from ..machine.memo import Memo
from ..machine.processes import Command, Finished
from ..request.key import digest_of
from ..request.plan import Plan
from ..request.sources import Roots, is_own, parse_depfile
from .commands import Unit

_ASSEMBLED = re.compile(rb"\.incbin|\.include(?=\s*\\\")")
_LISTS = ("d", "all.d", "host.d", "as.d")


def compile_units(
    plan: Plan,
    units: Sequence[Unit],
    staging: Path,
    memo: Memo,
    run: Callable[[Sequence[Command]], list[Finished]],
    tools: Callable[[], Iterable[str]] = tuple,
) -> list[Finished]:
    """Compile ``units`` with ``run``, which stops at the first failure, its last item.

    A launcher restores an object without the lists of nvcc's host compiler and of the assembler,
    and may miss an edit: ccache that of a header that only the host half of a ``.cu`` includes,
    sccache that of a file that ``.incbin`` reads, and both another assembler. So what nvcc reads
    is listed first, and a digest of that and of what compilers run (``tools``) is a part of the
    command. A unit with ``.incbin`` that was restored is compiled again without the launcher.
    """
    listed = [unit for unit in units if unit.is_listed]
    ahead = run([unit.listing for unit in listed]) if listed else []
    if ahead and ahead[-1].returncode != 0:
        return ahead
    units = [_with_digest(unit, plan, staging, memo, tools) for unit in units]
    finished = run([unit.command for unit in units])
    if finished[-1].returncode != 0:
        return finished
    again = [unit for unit in units if unit.launcher and _unknown(unit, plan, staging)]
    if again:
        restored = {unit.command for unit in again}
        finished = [item for item in finished if item.command not in restored]
        finished += run([unit.direct for unit in again])
        if finished[-1].returncode != 0:
            return finished
    for unit in units:
        if why := _unknown(unit, plan, staging):
            raise CompileError(f"module {plan.name!r}: {why}")
    return finished


def _with_digest(
    unit: Unit,
    plan: Plan,
    staging: Path,
    memo: Memo,
    tools: Callable[[], Iterable[str]],
) -> Unit:
    """``unit``, with the contents of what was listed, and is run, as a macro that nothing reads."""
    if not (unit.launcher or unit.is_listed):
        return unit
    read = (*read_by(unit, staging, plan.roots), *tools())
    states = {plan.roots.name(path): memo.state(path) for path in read}
    digest = digest_of([[name, state and state.digest] for name, state in sorted(states.items())])
    return replace(unit, options=(*unit.options, f"-DJITQUANT_READ_{digest[:16]}"))


def read_by(unit: Unit, staging: Path, roots: Roots) -> tuple[str, ...]:
    """What the lists of a unit name: of the compiler, of nvcc's own host compiler, of `as`.

    A file that is gone by now was removed meanwhile, unless it may be a temporary one.
    """
    inside = os.path.join(staging, "")
    read: dict[str, None] = {}
    for kind in _LISTS:
        try:
            text = (staging / f"{unit.stem}.{kind}").read_text(errors="surrogateescape")
        except FileNotFoundError:
            continue
        for path in parse_depfile(text):
            full = os.path.join(staging, path)
            if full == unit.source or full.startswith(inside):
                continue
            # What ccache and sccache make for the compilers is elsewhere.
            may_be_made = bool(unit.launcher) or unit.is_listed
            if os.path.exists(full) or not may_be_made or is_own(roots.name(full)):
                read.setdefault(full)
    return tuple(read)


def _unknown(unit: Unit, plan: Plan, staging: Path) -> str:
    """Why it is not known what was read for ``unit``; ``""`` if it is."""
    lists = {kind for kind in _LISTS if (staging / f"{unit.stem}.{kind}").exists()}
    if "d" not in lists or (unit.is_cuda and not lists & {"all.d", "host.d"}):
        return (
            f"{unit.command.label} did not list the headers that it read, so an edit of one would "
            "go unseen. Leave out flags that start with -M, or compile without what wraps the "
            "compiler (JITQUANT_NVCC_LAUNCHER, CXX)."
        )
    if "as.d" in lists:
        return ""
    for path in (unit.source, *read_by(unit, staging, plan.roots)):
        if plan.roots.name(path).startswith("=") or not os.path.exists(path):
            continue
        if used := _ASSEMBLED.search(Path(path).read_bytes()):
            return (
                f"{path} uses {used[0].decode()}, and the assembler of {plan.host.program} does "
                "not say which files it reads, so an edit of one would go unseen. Compile with g++ "
                "and without what wraps nvcc, or put the bytes into a header."
            )
    return ""
