"""The commands that compile and link a module."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ..machine.archs import gencode_flags
from ..machine.processes import Command, default_jobs
from ..machine.toolchain import cudart_flags, cxx_runtime_flags
from ..machine.torch_install import OLDEST_TORCH, torch_install
from ..request.plan import Plan, python_include_dir, wheel_include_dirs
from ..request.scan import IncludeScan, scan_includes
from ..request.sources import is_cuda
from ..units import release

#: The release of torch whose stable ABI is compiled against: 2.11.
STABLE_TARGET = f"0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"
_HALF_FLAGS = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
)
#: Ends the name of the directory where nvcc keeps what it makes of a source in between.
KEPT = ".kept"
TARGET_MACRO = "TORCH_TARGET_VERSION"
#: What only nvcc's host compiler includes, for the code that nvcc generates.
_LATE = ("crt/host_runtime.h", "crt/func_macro.h", "math_constants.h", "fatbinary_section.h")
#: Included first, since GCC takes a precompiled header for the first include alone. It takes one
#: that is older than its header too, and its depfile names neither.
FIRST = "jitquant_first.h"
#: Where the linker lists what it reads, if flags or variables can add something to that.
LINKED = "linked.d"
_LINKER_FLAGS = ("-l", "-L", "-Wl,", "-Xlinker")
#: Flags of these whose value may be the next word.
_LINKER_WORDS = ("-l", "-L", "-Xlinker")


@dataclass(frozen=True)
class Unit:
    """One source with the command that compiles it, in a staging directory.

    ``launcher`` runs the compiler, and may restore the object of an earlier compilation instead.
    The command of a ``shared`` unit is the same for every module with the same flags. ``is_listed``
    is whether the command ``listing``, which writes ``<stem>.all.d``, has to run first.
    """

    source: str
    stem: str
    launcher: tuple[str, ...]
    compiler: tuple[str, ...]
    options: tuple[str, ...]
    scan: IncludeScan
    shared: bool = False
    is_listed: bool = False

    @property
    def output(self) -> str:
        """The object."""
        return f"{self.stem}.o"

    @property
    def is_cuda(self) -> bool:
        """Whether nvcc compiles it."""
        return is_cuda(self.source)

    @property
    def command(self) -> Command:
        """The command that compiles it."""
        return self.direct._replace(argv=(*self.launcher, *self.direct.argv))

    @property
    def direct(self) -> Command:
        """The same without the launcher."""
        return self._command("-c", self.output, "-MD", "-MF", f"{self.stem}.d")

    @property
    def listing(self) -> Command:
        """The command that lists what nvcc reads, and compiles nothing."""
        late = [word for header in _LATE for word in ("-include", header)]
        return self._command("-M", f"{self.stem}.all.d", *late)

    def _command(self, how: str, output: str, *words: str) -> Command:
        name = "nvcc" if self.is_cuda else os.path.basename(self.compiler[0])
        label = f"{name} {os.path.basename(self.source)}"
        argv = (*self.compiler, how, self.source, "-o", output, *words, *self.options)
        return Command(argv, label, output)


def make_units(plan: Plan, extension: str, staging: Path, jobs: int | None = None) -> list[Unit]:
    """The compile command of each source. Objects are numbered, so that names do not collide.

    Generated bindings are written to ``staging``. A compiler that builds several architectures
    builds at most ``jobs`` at once.
    """
    units: list[Unit] = []
    (staging / FIRST).touch()
    generated = [str(staging / binding.file_name) for binding in plan.bindings]
    for binding, path in zip(plan.bindings, generated, strict=True):
        text = binding.text(binding.source)  # with the path, whose bytes may be any
        Path(path).write_text(text, encoding="utf-8", errors="surrogateescape")

    def add(stem: str, source: str, scan: IncludeScan, *, shared: bool) -> None:
        launcher, is_listed = plan.host.wrapper or plan.launcher, False
        compiler = (plan.host.program, *plan.host.flags)
        if is_cuda(source):
            assert plan.nvcc is not None
            launcher, compiler = plan.launcher, (plan.nvcc.command,)
            is_listed = bool(launcher) or plan.nvcc.keeps_objects
            options = _cuda_options(plan, extension, stem, scan, jobs or default_jobs())
        else:
            options = _cxx_options(plan, None if shared else extension, stem, source, scan)
        units.append(
            Unit(source, stem, launcher, compiler, tuple(options), scan, shared, is_listed)
        )

    shared: dict[str, None] = {}
    for index, source in enumerate((*plan.sources, *generated)):
        scan = scan_includes(source, plan.include_dirs)
        if plan.debug:
            (staging / f"o{index}{KEPT}").mkdir()
        add(f"o{index}", source, scan, shared=False)
        shared |= dict.fromkeys(_shared_sources(plan, scan))
    for source in shared:
        scan = scan_includes(source, plan.include_dirs)
        add(Path(source).stem, source, scan, shared=True)
    return units


def _shared_sources(plan: Plan, scan: IncludeScan) -> Iterator[str]:
    """``x.cpp`` of the project's bindings for each ``x.h`` of them that a source includes."""
    for header in scan.files:
        stem, suffix = os.path.splitext(header)
        source = f"{stem}.cpp"
        if suffix == ".h" and _is_of_bindings(plan, header) and os.path.isfile(source):
            yield source


def _is_of_bindings(plan: Plan, path: str) -> bool:
    bindings = os.path.join(plan.roots.labels["lib"], "bindings")
    return os.path.dirname(path) in (bindings, os.path.join(bindings, "declared"))


def _host_flags(plan: Plan) -> list[str]:
    """Flags for the host side of every source.

    GCC shares the static variables of inline functions between all libraries of a process
    (STB_GNU_UNIQUE), and so between two modules or two versions of one. In depfiles it names the
    target of a symbolic link to a header of -isystem, so that a new target would be missed. clang
    does neither.
    """
    if "clang" in plan.host.version:
        return ["-fPIC"]
    return ["-fPIC", "-fno-gnu-unique", "-fno-canonical-system-headers"]


def names_incbins(plan: Plan) -> bool:
    """Whether the assembler lists what ``.incbin`` reads: GNU's does, clang's does not."""
    flags = (*plan.request.cuda_flags, *plan.request.cxx_flags)
    return "clang" not in plan.host.version and not _chooses_host_compiler(flags)


def _chooses_host_compiler(flags: Iterable[str]) -> bool:
    """Whether flags of nvcc, or its variable, choose another host compiler than the plan's."""
    chosen = any(flag.startswith(("-ccbin", "--compiler-bindir")) for flag in flags)
    return chosen or "NVCC_CCBIN" in os.environ


def _cuda_options(plan: Plan, extension: str, stem: str, scan: IncludeScan, jobs: int) -> list[str]:
    nvcc = plan.nvcc
    assert nvcc is not None
    flags = plan.request.cuda_flags
    argv: list[str] = []
    if not _chooses_host_compiler(flags):
        argv += ["-ccbin", plan.host.program]
    argv += gencode_flags(plan.archs.archs)
    if len(plan.archs.archs) > 1:
        argv += ["--threads", str(min(len(plan.archs.archs), jobs))]
    if plan.debug:
        # -G implies -lineinfo; nvcc and ptxas warn if both are given.
        argv += ["-G", "-g", "-O0", "--keep", "--keep-dir", f"{stem}{KEPT}"]
    elif jobs > 1 and release(nvcc.version) >= (12, 2):
        # Saves a quarter of the time for the largest modules. Register counts then depend slightly
        # on how the threads divide the work.
        argv.append("--split-compile=2")
    argv += [] if plan.debug else ["-O2", "-lineinfo"]
    argv += ["--resource-usage", f"-DTORCH_EXTENSION_NAME={extension}"]
    # nvcc's own depfile leaves out what its host compiler reads last.
    host = [*_host_flags(plan), "-MD", "-MF", f"{stem}.host.d"]
    if names_incbins(plan):
        host.append(f"-Wa\\,--MD\\,{stem}.as.d")
    argv += ["-Xcompiler", ",".join(host)]
    if not _sets_standard(flags):
        argv.append("-std=c++20" if scan.torch else "-std=c++17")
    for directory in plan.include_dirs:
        argv += ["-I", directory]
    if scan.torch:
        argv += [*_HALF_FLAGS, "--expt-relaxed-constexpr", "-DTORCH_API_INCLUDE_EXTENSION_H"]
        for directory in (
            *torch_install().include_dirs,
            python_include_dir(),
            *wheel_include_dirs(),
        ):
            argv += ["-isystem", directory]
    return [*argv, *flags]


def _cxx_options(
    plan: Plan, extension: str | None, stem: str, source: str, scan: IncludeScan
) -> list[str]:
    flags, _ = _divided(plan.request.cxx_flags)
    argv = [f"-include{FIRST}"]
    argv += [f"-Wa,--MD,{stem}.as.d"] if names_incbins(plan) else []
    argv += [*(["-O0", "-g"] if plan.debug else ["-O2"]), *_host_flags(plan)]
    if extension is not None:
        argv.append(f"-DTORCH_EXTENSION_NAME={extension}")
    if scan.torch:
        argv.append("-DTORCH_API_INCLUDE_EXTENSION_H")
    else:
        argv.append(f"-D{TARGET_MACRO}={STABLE_TARGET}")
    if not _sets_standard(flags):
        # The project's bindings include no C++ of torch, and take a fifth less time this way.
        argv.append("-std=c++17" if _is_of_bindings(plan, source) else "-std=c++20")
    for directory in plan.include_dirs:
        argv += ["-I", directory]
    cuda = plan.nvcc.include_dirs if plan.nvcc else ()
    if scan.torch:
        cuda += wheel_include_dirs()
    for directory in (*torch_install().include_dirs, python_include_dir(), *cuda):
        argv += ["-isystem", directory]
    return [*argv, *flags]


def _divided(flags: Iterable[str]) -> tuple[list[str], list[str]]:
    """Flags for C++: the compiler's, and the linker's with the words that belong to them."""
    compiler: list[str] = []
    linker: list[str] = []
    for before, word in pairwise(("", *flags)):
        is_linkers = before in _LINKER_WORDS or word.startswith(_LINKER_FLAGS)
        (linker if is_linkers else compiler).append(word)
    return compiler, linker


def _sets_standard(flags: tuple[str, ...] | list[str]) -> bool:
    return any(flag.startswith(("-std", "--std")) for flag in flags)


def compiler_environment() -> dict[str, str]:
    """The environment of the compilers: English messages, temporary files in their directory."""
    # ccache takes -gencode for -g, and would not find what another staging directory compiled. With
    # DEPEND it checks all that the depfile lists, and keeps nothing if a header was just edited.
    ccache = {"CCACHE_NOHASHDIR": "1", "CCACHE_DEPEND": "1"}
    return {**ccache, **os.environ, "LC_ALL": "C.UTF-8", "LANGUAGE": "", "TMPDIR": "."}


def linker_flags(plan: Plan, units: list[Unit]) -> list[str]:
    """What to link besides torch's own libraries."""
    flags = [*plan.host.flags, *_divided(plan.request.cxx_flags)[1]]
    if flags or os.environ.get("LIBRARY_PATH"):
        flags.append(f"-Wl,--dependency-file={LINKED}")
    if torch_install().cuda and any(unit.scan.torch for unit in units):
        flags += ["-lc10_cuda", "-ltorch_cuda"]
    if plan.nvcc is not None:
        flags += cudart_flags(plan.nvcc)
    return [*flags, *cxx_runtime_flags(plan.host)]
