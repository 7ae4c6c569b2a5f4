"""Asks a compiler where it searches and what it runs, with the command that it compiles with."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..machine.processes import ask
from ..request.searches import TOOLS, IncludePath

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
_DEFINES = re.compile(r'-D[ "]*(\w+(?:\([^)]*\))?)=(.*?)(?= -|$)')
_NVCC_SETS = re.compile(r"^#\$ (\w+)=(.*)$", re.MULTILINE)
_NVCC_RUNS = re.compile(r'^#\$ "?(?:\$CICC_PATH/)?([^\s"=]+)"? ', re.MULTILINE)
_RUNS = re.compile(r'^ "?(/[^\s"]+)"? (.*)$|^Reading specs from (.*)$', re.MULTILINE)
_RUNS_FROM = re.compile(r"^(?:COMPILER|LIBRARY)_PATH=(.*)$", re.MULTILINE)
_PREPROCESSES = re.compile(r"^#\$ (.* -E -x c\+\+ .*)$", re.MULTILINE)
_DROPPED = ("-c", "-E", "-MD", "-M", "-MMD")
_DROPPED_WITH_VALUE = ("-o", "-MF", "-include")


def include_path(
    argv: Sequence[str], source: str, *, is_nvcc: bool, env: Mapping[str, str], cwd: Path
) -> IncludePath | None:
    """Where the command ``argv``, which compiles ``source``, searches, and what it runs.

    Directories that it names and that cannot be searched now come first, because their position is
    unknown. Those of the assembler and of ``#embed`` come last.
    ``None`` for a compiler that does not answer like GCC and clang.
    """
    command, tools = list(argv), [argv[0]]
    if is_nvcc:
        plan = ask([*argv, "--dryrun"], env, cwd)
        inner = _PREPROCESSES.search(plan)
        if inner is None:
            return None
        command = shlex.split(inner.group(1))
        sets = dict(_NVCC_SETS.findall(plan))
        here, device = sets.get("_HERE_", ""), sets.get("NVVMIR_LIBRARY_DIR", "")
        env = {**env, "PATH": sets.get("PATH", env.get("PATH", ""))}
        tools += {*_NVCC_RUNS.findall(plan)} - {"rm"}
        tools += [f"{here}/nvcc", f"{here}/nvcc.profile", f"{device}/libdevice.10.bc"]
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
        return None
    places = env.get("COMPILER_PATH", "").split(os.pathsep)
    places += [word[2:] for word in kept if word.startswith("-B")]
    places += [place for line in _RUNS_FROM.findall(said) for place in line.split(os.pathsep)]
    places = [place for place in dict.fromkeys(places) if os.path.isabs(place)]
    runs = _RUNS.findall(said)
    tools += [kept[0], *(program or specs for program, _, specs in runs), *TOOLS]
    macros = (macro for _, words, _ in runs for macro in _DEFINES.findall(words))
    path = env.get("PATH", "").split(os.pathsep)
    quoted, bracketed = _lines(listed.group(1)), _lines(listed.group(2))
    duplicates = tuple(dict.fromkeys(_DUPLICATE.findall(said)))
    ignored = [first or second for first, second in _IGNORED.findall(said)]
    others = [d for word in kept if word.startswith("-Wa,") for d in _ASSEMBLER.findall(word)]
    others += [word.partition("=")[2] for word in kept if word.startswith("--embed-dir=")]
    return IncludePath(
        quoted=(*ignored, *quoted),
        bracketed=(*bracketed, *others),
        duplicates=duplicates,
        flags=tuple(f"#define {n} {text}\n".replace('\\"', '"') for n, text in macros),
        tools=tuple(dict.fromkeys(files_in([*places, *path], tools))),
        tool_places=tuple(places),
    )


def files_in(directories: Sequence[str], names: Iterable[str]) -> Iterator[str]:
    """The first file with each of ``names``, or of these paths, in ``directories``."""
    for name in names:
        paths = (os.path.join(directory, name) for directory in directories)
        yield from itertools.islice(filter(os.path.isfile, paths), 1)


def _lines(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"^ (.*?)(?: \(framework directory\))?$", text, re.MULTILINE))
