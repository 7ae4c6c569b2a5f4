"""The code of a build: SASS from its library, PTX by compiling again, both with source lines."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..compile.commands import compiler_environment, make_units
from ..compile.usage import KernelUsage
from ..diagnostics import compile_error
from ..errors import LoaderError, ToolNotFoundError, extra
from ..machine.scratch import scratch
from ..machine.symbols import demangle
from ..machine.toolchain import program_places
from ..request.plan import Plan, Request, Wanted

if TYPE_CHECKING:
    from ..core import Loader
    from ..store.match import Build

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+),")
_SASS_LINE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)')
_INSTRUCTION = re.compile(r"^\s+(?:/\*[0-9a-f]+\*/\s+\S.*|\{|\})\s*$")
_LABEL = re.compile(r"^[.$\w]+:$")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"')
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\b")
_ENTRY = re.compile(r"^\s*(?:\.\w+\s+)*\.entry\s+(\w+)")
_NOT_FOR_PTX = ("-gencode", "--resource-usage")


@dataclass(frozen=True)
class CodeLine:
    """One line of SASS or PTX and its source line; ``file`` is ``""`` if unknown."""

    text: str
    file: str
    line: int


@dataclass(frozen=True)
class Code:
    """The code of one kernel for one architecture; ``kernel`` is the mangled name."""

    kernel: str
    name: str
    arch: str
    lines: list[CodeLine] = field(repr=False)


def find_tool(name: str, env: Mapping[str, str] = os.environ) -> str:
    """The path of ``cuobjdump`` or ``nvdisasm``; a newer one reads the code of older compilers.

    Order: ``CUDA_HOME``, ``CUDA_PATH``, the PyPI wheels, ``PATH``, ``/usr/local/cuda``, triton.
    """
    places = [path for path, _ in program_places(name, env)]
    # triton brings its own, for what it compiles itself.
    spec = importlib.util.find_spec("triton")
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        places.append(os.path.join(directory, "backends", "nvidia", "bin", name))
    for path in places:
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise ToolNotFoundError(
        f"{name} was not found in CUDA_HOME, CUDA_PATH, the PyPI wheels, PATH, /usr/local/cuda or "
        f"triton. Install {extra('inspect')}."
    )


def build_of(loader: Loader, request: Request) -> Build:
    """The build that ``request`` would load: from a bundle, from the cache, or a new one."""
    return loader.search_bundles(loader.look_up(request))[0] or loader.ensure(request)


def kernels_of(build: Build) -> list[KernelUsage]:
    """The resources of each kernel of a build, as the assembler reported them."""
    found = [KernelUsage(**kernel) for kernel in build.entry.info["kernels"]]
    return sorted(found, key=lambda usage: (usage.name, usage.arch))


def sass(loader: Loader, request: Request) -> list[Code]:
    """The machine code of ``request``, for each architecture that its build has."""
    cuobjdump, nvdisasm = find_tool("cuobjdump"), find_tool("nvdisasm")
    build = build_of(loader, request)
    found: list[Code] = []
    with scratch("sass") as place:
        _run([cuobjdump, "-xelf", "all", str(build.library)], place)
        for cubin in sorted(place.glob("*.cubin")):
            arch = cubin.name.split(".")[-2].removeprefix("sm_")
            text = _run([nvdisasm, "--print-code", "--print-line-info", cubin.name], place)
            found += _read_sass(text, arch)
    return _where_they_are_now(found, loader.look_up(request), build)


def ptx(plan: Plan) -> list[Code]:
    """The PTX that the sources of ``plan`` are compiled to, for each architecture.

    A build contains only machine code, so the device half is compiled again, with the same flags.
    """
    found: list[Code] = []
    with scratch("ptx") as place:
        for unit in make_units(plan, plan.name, place):
            if not unit.is_cuda:
                continue
            options = [flag for flag in unit.options if not flag.startswith(_NOT_FOR_PTX)]
            for arch in plan.archs.archs:
                name = arch.partition("+")[0]
                output = ("-ptx", f"-arch=compute_{name}", "-o", "out.ptx")
                argv = [*unit.compiler, unit.source, *options, *output]
                done = subprocess.run(
                    argv,
                    cwd=place,
                    env=compiler_environment(),
                    capture_output=True,
                    text=True,
                    errors="replace",
                    check=False,
                )
                if done.returncode != 0:
                    failed = (argv, unit.command.label)
                    said = done.stdout + done.stderr
                    raise compile_error(plan.name, failed, done.returncode, said, place)
                text = (place / "out.ptx").read_text(errors="replace")
                found += _read_ptx(text, name)
    return found


def with_sources(code: Code, show: Callable[[str], str] = str) -> Iterator[tuple[str, bool]]:
    """The lines of ``code`` with source lines in between; each with whether it is a source line.

    ``show`` formats the path of a source.
    """
    texts: dict[str, list[str]] = {}
    last: tuple[str, int] | None = None
    for line in code.lines:
        place = (line.file, line.line)
        if line.file and place != last:
            last = place
            if line.file not in texts:
                try:
                    texts[line.file] = Path(line.file).read_text(errors="replace").splitlines()
                except OSError:
                    texts[line.file] = []
            lines = texts[line.file]
            source = lines[line.line - 1].strip() if 0 < line.line <= len(lines) else ""
            yield f"// {show(line.file)}:{line.line}  {source}".rstrip(), True
        yield line.text, False


def _where_they_are_now(codes: list[Code], wanted: Wanted, build: Build) -> list[Code]:
    """``codes`` with local paths, if the build was made from the same files elsewhere."""
    here: dict[str, set[str]] = {}
    for path in (*wanted.sources, *map(wanted.roots.path, build.entry.headers)):
        here.setdefault(os.path.basename(path), set()).add(path)

    def moved(path: str) -> str:
        found = here.get(os.path.basename(path), set())
        return next(iter(found)) if len(found) == 1 and not os.path.exists(path) else path

    return [
        replace(code, lines=[replace(line, file=moved(line.file)) for line in code.lines])
        for code in codes
    ]


def _run(argv: list[str], directory: Path) -> str:
    done = subprocess.run(
        argv, cwd=directory, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise LoaderError(f"{argv[0]} failed: {said or f'exit code {done.returncode}'}")
    return done.stdout


def _read_sass(text: str, arch: str) -> list[Code]:
    found: list[Code] = []
    file, number = "", 0
    for line in text.splitlines():
        if match := _SECTION.match(line):
            found.append(Code(match[1], demangle(match[1]), arch, []))
            file, number = "", 0
        elif not found:
            continue
        elif match := _SASS_LINE.match(line):
            file, number = match[1], int(match[2])
        elif _INSTRUCTION.match(line) or (
            _LABEL.match(line) and line.removeprefix(".text.") != f"{found[-1].kernel}:"
        ):
            found[-1].lines.append(CodeLine(line.rstrip(), file, number))
    return found


def _read_ptx(text: str, arch: str) -> list[Code]:
    files = {match[1]: match[2] for match in map(_FILE.match, text.splitlines()) if match}
    found: list[Code] = []
    inside = False
    file, number = "", 0
    for line in text.splitlines():
        if match := _ENTRY.match(line):
            found.append(Code(match[1], demangle(match[1]), arch, []))
            inside, file, number = True, "", 0
        if not inside:
            continue
        if match := _LOC.match(line):
            file, number = files.get(match[1], ""), int(match[2])
            continue
        if line.strip():
            found[-1].lines.append(CodeLine(line.rstrip(), file, number))
        if line.startswith("}"):
            inside = False
    return found
