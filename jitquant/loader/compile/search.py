"""Asks a compiler for its include directories, with the command that it compiles with."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..request.includes import IncludePath

_SECONDS = 60.0
_LISTED = re.compile(
    r'^#include "\.\.\." search starts here:\n(.*?)^#include <\.\.\.> search starts here:\n(.*?)'
    r"^End of search list",
    re.MULTILINE | re.DOTALL,
)
_IGNORED = re.compile(
    r'^ignoring nonexistent directory "(.*)"$|^\S+: warning: (/.*): (?:not a dir|Permission den)',
    re.MULTILINE | re.IGNORECASE,
)
_DUPLICATE = re.compile(r'^ignoring duplicate directory "(.*)"$', re.MULTILINE)
_ASSEMBLER = re.compile(r",-I,?([^,]+)")
_MACRO = re.compile(r'-D[ "]*(\w+)=(?:\\?"([^"\\\n]+)|<([^>\n]+))')
_NVCC_SETS_PATH = re.compile(r"^#\$ PATH=(.*)$", re.MULTILINE)
_PREPROCESSES = re.compile(r"^#\$ (.* -E -x c\+\+ .*)$", re.MULTILINE)
_DROPPED = ("-c", "-E", "-MD", "-M", "-MMD")
_DROPPED_WITH_VALUE = ("-o", "-MF", "-include")


def include_path(
    argv: Sequence[str], source: str, *, is_nvcc: bool, env: Mapping[str, str], cwd: Path
) -> IncludePath:
    """The include directories of the command ``argv``, which compiles ``source``.

    Directories that it names and that cannot be searched now come first, because their position is
    unknown. Those of the assembler and of ``#embed`` come last.
    Empty for a compiler that does not answer like GCC and clang.
    """
    command = list(argv)
    if is_nvcc:
        plan = ask([*argv, "--dryrun"], env, cwd)
        inner = _PREPROCESSES.search(plan)
        if inner is None:
            return IncludePath()
        command = shlex.split(inner.group(1))
        if path := _NVCC_SETS_PATH.search(plan):
            env = {**env, "PATH": path.group(1)}
    words = iter(command)
    kept: list[str] = []
    for word in words:
        if word in _DROPPED_WITH_VALUE:
            next(words, None)
        elif word not in _DROPPED and word != source:
            kept.append(word)
    said = ask([*kept, "-E", "-v", "-x", "c++", os.devnull], env, cwd)
    listed = _LISTED.search(said)
    if listed is None:
        return IncludePath()
    quoted, bracketed = _lines(listed.group(1)), _lines(listed.group(2))
    duplicates = tuple(dict.fromkeys(_DUPLICATE.findall(said)))
    ignored = [first or second for first, second in _IGNORED.findall(said)]
    others = [d for word in kept if word.startswith("-Wa,") for d in _ASSEMBLER.findall(word)]
    others += [word.partition("=")[2] for word in kept if word.startswith("--embed-dir=")]
    macros = tuple(
        f'#define {name} "{quote}"\n' if quote else f"#define {name} <{bracket}>\n"
        for name, quote, bracket in _MACRO.findall(said)
    )
    return IncludePath((*ignored, *quoted), (*bracketed, *others), duplicates, macros)


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip().removesuffix(" (framework directory)") for line in text.splitlines())


def ask(argv: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> str:
    """A compiler's output; empty if it cannot be started."""
    try:
        done = subprocess.run(
            argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="surrogateescape")
