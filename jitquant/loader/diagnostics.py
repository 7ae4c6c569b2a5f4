"""Reading what nvcc, the host compiler, ptxas and the linker print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from .errors import CompileError, Diagnostic

_MOST_SHOWN = 3
_PLAIN_QUOTES = str.maketrans("‘’", "''")
# a.cu(3): error: identifier "x" is undefined          (cudafe++, cicc)
_EDG = re.compile(
    r"^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): (?P<severity>(?:catastrophic |fatal )?"
    r"error|warning)(?: #[\w-]+)?: (?P<message>.*)$"
)
# a.cpp:3:14: error: 'x' was not declared in this scope (gcc, clang)
_GNU = re.compile(
    r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+):(?:(?P<column>\d+):)? "
    r"(?P<severity>fatal error|error|warning): (?P<message>.*)$"
)
# ptxas k.ptx, line 24; error   : Unknown modifier '.bar'
_PTXAS = re.compile(
    r"^ptxas(?: [^,]+, line (?P<line>\d+);)? ?(?P<severity>error|fatal|warning)\s*: "
    r"(?P<message>.*)$"
)
# nvcc fatal   : Unknown option '--bogus'
_NVCC = re.compile(
    r"^(?:nvcc|nvlink|cicc|cudafe\+\+|fatbinary)\s?(?P<severity>fatal|error|warning)"
    r"\s*: (?P<message>.*)$"
)
_LINKER = re.compile(
    r"^(?:\S*/)?(?:[\w.+-]+-)?(?:ld(?:\.\w+)?|mold|collect2): "
    r"(?P<message>(?!.*\bin function\b).+)$"
    r"|^[^:]*:\([^)]*\): (?P<symbol>(?:multiple definition of|undefined reference to) .*)$"
)
_SAID_BY = ((_EDG, ""), (_GNU, ""), (_PTXAS, "ptxas"), (_NVCC, "nvcc"), (_LINKER, "linker"))
_REMARK = re.compile(r"(?:warning|note): |skipping incompatible ", re.IGNORECASE)
_CARET = re.compile(r"^(\s*)\^[\s~]*$")
_RELATIVE = re.compile(r"(?<= )-(?:I|isystem|iquote) ?[^-/ ]\S*")
_KILLED = re.compile(
    r"^Killed\s*$|FAILED: \[code=137\]|"
    r"died due to signal 9|Killed \(program|\bKilled signal terminated program|"
    r"out of memory|cannot allocate memory|virtual memory exhausted|"
    r"std::bad_alloc",
    re.IGNORECASE | re.MULTILINE,
)
#: What to do where a message is like these.
_ADVICE = {
    r"unsupported GNU version|unsupported clang version|-allow-unsupported-compiler": (
        "This nvcc does not support this host compiler. Install an older one and set CXX to it "
        "(for example CXX=g++-13), or use a newer CUDA toolkit."
    ),
    r"cuda_cmake_macros\.h|(?:ATen|c10)/cuda/\S+: No such file": (
        "This source includes torch's CUDA headers, which only a CUDA build of torch can compile "
        "against. Bind the launcher through torch/csrc/stable/library.h instead, or install a "
        "CUDA build of torch."
    ),
    r"either TORCH_STABLE_ONLY or TORCH_TARGET_VERSION is defined": (
        "A source mixes torch's stable headers with others. Include torch/extension.h in the "
        "source itself, not only in a header that is found through a compiler flag."
    ),
    r"(?:unknown|unrecognized).*--dependency-file": (
        "This linker does not list what it reads, so an edit of that would go unseen. Use "
        "binutils 2.35 or newer, gold, lld or mold of that age."
    ),
    r"no storage class or type specifier\n\s*JITQUANT_EXPORT": (
        'JITQUANT_EXPORT is not known: write #include "jitquant/export.h".'
    ),
    r"lto-wrapper|fatal error: .*\bptxas\b.*version|Unsupported \.version": (
        "The parts of the CUDA toolkit are of different versions: nvcc, nvvm and crt must be of "
        "one minor version."
    ),
}


def parse(text: str, root: Path) -> list[Diagnostic]:
    """The messages in the output of a compiler or linker, in order, without repetitions.

    ``root`` is the directory that relative file names in ``text`` start from.
    """
    found: dict[Diagnostic, None] = {}
    lines = text.splitlines()
    for index, line in enumerate(lines):
        diagnostic = _parse_line(line.translate(_PLAIN_QUOTES), lines[index + 1 : index + 3], root)
        if diagnostic is not None:
            found.setdefault(diagnostic)
    return list(found)


def _edg_column(match: re.Match[str], following: Sequence[str], root: Path) -> int | None:
    """The column of a message of EDG's front end, which shows the preprocessed line."""
    source = _source_line(root / match["file"], int(match["line"]))
    if source is None:
        return None
    if len(following) == 2 and following[0].strip() == source.strip():
        caret = _CARET.match(following[1])
        if caret:
            shown_indent = len(following[0]) - len(following[0].lstrip())
            source_indent = len(source) - len(source.lstrip())
            return max(len(caret.group(1)) - shown_indent + source_indent + 1, 1)
    quoted = re.search(r'"(\w+)"', match["message"])
    where = re.search(rf"\b{quoted.group(1)}\b", source) if quoted else None
    return where.start() + 1 if where else None


def _source_line(path: Path, line: int) -> str | None:
    try:
        return path.read_text(errors="replace").splitlines()[line - 1].expandtabs(1)
    except (OSError, ValueError, IndexError):  # not a name that this process can write
        return None


def _parse_line(line: str, following: Sequence[str], root: Path) -> Diagnostic | None:
    for pattern, tool in _SAID_BY:
        if (match := pattern.match(line)) is None:
            continue
        found = match.groupdict()
        message = found.get("symbol") or found["message"]
        severity = found.get("severity") or ("warning" if _REMARK.match(message) else "error")
        if severity not in ("warning", "fatal error"):
            severity = "error"
        if tool:
            where = f" (line {found['line']} of the PTX)" if found.get("line") else ""
            return Diagnostic("", 0, None, severity, f"{tool}: {message}{where}")
        column = int(found["column"]) if found.get("column") else None
        if pattern is _EDG:
            column = _edg_column(match, following, root)
        return Diagnostic(found["file"], int(found["line"]), column, severity, message)
    return None


def excerpt(diagnostic: Diagnostic, root: Path) -> str:
    """The source line of ``diagnostic`` with a caret below the column; ``""`` if unknown."""
    if not diagnostic.file:
        return ""
    source = _source_line(root / diagnostic.file, diagnostic.line)
    if source is None:
        return ""
    number = f"{diagnostic.line:6d}"
    shown = f"{number} | {source}"
    if diagnostic.column is not None:
        shown += f"\n{' ' * len(number)} | {' ' * (diagnostic.column - 1)}^"
    return shown


def out_of_memory(text: str, returncode: int) -> bool:
    """Whether a command ended because the machine ran out of memory."""
    return returncode in (137, -9) or bool(_KILLED.search(text))


def hints(text: str, returncode: int, command: Sequence[str] = ()) -> list[str]:
    """What to do about failures of ``command`` whose own message does not say it."""
    found: list[str] = []
    relative = _RELATIVE.search(" ".join(command))
    if relative and "No such file" in text:
        found.append(
            f"{relative[0]} is relative to the directory of the build. Use an absolute path, or "
            "include_dirs=, which is relative to the working directory."
        )
    if out_of_memory(text, returncode):
        found.append(
            "The compiler was killed, most likely because memory ran out. Compile fewer things at "
            "once (JITQUANT_JOBS=1), for fewer architectures (JITQUANT_CUDA_ARCHS), or give the "
            "container more memory."
        )
    found += [advice for pattern, advice in _ADVICE.items() if re.search(pattern, text)]
    if command[:1] == ["nvrtc"] and re.search(
        r"is undefined|cannot open source file|kernel launch could not", text
    ):
        found.append(
            "NVRTC compiles device code alone: put launchers, and the headers that only they need, "
            "in #ifndef __CUDACC_RTC__ ... #endif."
        )
    return found


def compile_error(
    name: str,
    failed: tuple[Sequence[str], str],
    returncode: int,
    text: str,
    root: Path,
    log_path: Path | None = None,
) -> CompileError:
    """The error for a command that failed, with excerpts of the sources it complains of.

    ``failed`` is the command and its label, ``root`` as for :func:`parse`.
    """
    command, label = failed
    diagnostics = parse(text, root)
    errors = [d for d in diagnostics if d.is_error]
    how = f"killed by signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
    lines = [f"building {name!r} failed: {label} ({how})."]
    for diagnostic in errors[:_MOST_SHOWN]:
        where = f"{diagnostic.file}:{diagnostic.line}: " if diagnostic.file else ""
        lines.append(f"\n{where}{diagnostic.severity}: {diagnostic.message}")
        if shown := excerpt(diagnostic, root):
            lines.append(shown)
    if len(errors) > _MOST_SHOWN:
        lines.append(f"\n({len(errors) - _MOST_SHOWN} more errors in the log)")
    if not errors:
        tail = text.strip().splitlines()[-12:]
        lines.append("\n" + ("\n".join(tail) if tail else "(the command printed nothing)"))
    lines.extend(f"\n{hint}" for hint in hints(text, returncode, command))
    if command:
        lines.append(f"\ncommand: {shlex.join(command)}")
    if log_path is not None:
        lines.append(f"whole log: {log_path}")
    return CompileError(
        "\n".join(lines),
        diagnostics=diagnostics,
        command=command,
        log_path=log_path,
        out_of_memory=out_of_memory(text, returncode),
    )
