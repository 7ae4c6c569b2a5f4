"""From a plan to a shared library: compile in parallel, link, try to load."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..diagnostics import compile_error, parse
from ..errors import CompileError
from ..machine.archs import gencode_flags
from ..machine.processes import Command, default_jobs, run_side_by_side
from ..machine.toolchain import cudart_flags, cxx_runtime_flags
from ..machine.torch_install import OLDEST_TORCH, torch_install
from ..request import includes
from ..request.exports import unusable_export
from ..request.key import digest_of
from ..request.named import libraries_of, named_by
from ..request.plan import Plan, all_flags, python_include_dir, wheel_include_dirs
from ..request.sources import CUDA_SUFFIXES, IncludeScan, parse_depfile, scan_includes
from .abi import links_stable
from .search import ask, include_path
from .shared import Compiled, SharedObjects
from .trial import Trial, link_and_try
from .usage import KernelUsage, split_usage

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
_TARGET_MACRO = "TORCH_TARGET_VERSION"
_LINKER_FLAGS = ("-l", "-L", "-Wl,")
_PROBE_BYTES = 1 << 16
_T = TypeVar("_T")
#: The functions that the macro defines, in the table of an object's symbols.
_EXPORTED = re.compile(rb"\0jitquant_export_(\w+)(?=\0)")


@dataclass(frozen=True)
class Unit:
    """One source with the command that compiles it, in the directory of ``depfiles``.

    The command of a ``shared`` one is the same for every module with the same flags.
    """

    source: str
    command: Command
    output: str
    depfiles: tuple[Path, ...]
    scan: IncludeScan
    shared: bool = False


@dataclass(frozen=True)
class Built:
    """A linked library, the files and directories that the compilers read, and their output.

    ``linked`` are the archives linked into it and other files that flags name, ``searched`` the
    linker's search directories.

    ``steps`` are the seconds of each command; the compilers run in parallel. ``stable`` is whether
    it uses torch only through its stable ABI.
    """

    library: Path
    units: tuple[includes.Unit, ...]
    linked: tuple[str, ...]
    searched: tuple[includes.Searched, ...]
    trial: Trial
    steps: tuple[tuple[str, float], ...]
    kernels: tuple[KernelUsage, ...]
    stable: bool


def make_units(plan: Plan, extension: str, staging: Path, jobs: int | None = None) -> list[Unit]:
    """The compile command of each source. Objects are numbered, so that names do not collide.

    Generated bindings are written to ``staging``. A compiler that builds several architectures
    builds at most ``jobs`` at once.
    """
    units: list[Unit] = []
    generated = [str(staging / binding.file_name) for binding in plan.bindings]
    for binding, path in zip(plan.bindings, generated, strict=True):
        Path(path).write_text(binding.text(binding.source))

    def add(stem: str, source: str, scan: IncludeScan, *, shared: bool) -> None:
        depfiles = tuple(staging / f"{stem}.{kind}" for kind in ("d", "host.d", "as.d"))
        is_cuda = source.lower().endswith(CUDA_SUFFIXES)
        if is_cuda:
            argv = _cuda_command(plan, extension, source, stem, scan, jobs or default_jobs())
        else:
            argv = _cxx_command(plan, None if shared else extension, source, stem, scan)
        compiler = "nvcc" if is_cuda else os.path.basename(plan.host.command[0])
        label = f"{compiler} {os.path.basename(source)}"
        command = Command(tuple(argv), label)
        units.append(Unit(source, command, f"{stem}.o", depfiles, scan, shared))

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
    bindings = os.path.join(plan.roots.labels["lib"], "bindings")
    for header in scan.files:
        stem, suffix = os.path.splitext(header)
        source = f"{stem}.cpp"
        if suffix == ".h" and os.path.dirname(header) == bindings and os.path.isfile(source):
            yield source


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
    return (
        "clang" not in plan.host.version
        and "NVCC_CCBIN" not in os.environ
        and not any(flag.startswith(("-ccbin", "--compiler-bindir")) for flag in flags)
    )


def _cuda_command(
    plan: Plan, extension: str, source: str, stem: str, scan: IncludeScan, jobs: int
) -> list[str]:
    nvcc = plan.nvcc
    assert nvcc is not None
    flags = plan.request.cuda_flags
    argv = [*plan.launcher, nvcc.command, "-c", source, "-o", f"{stem}.o"]
    argv += ["-MD", "-MF", f"{stem}.d"]
    if "NVCC_CCBIN" not in os.environ and not any(
        flag.startswith(("-ccbin", "--compiler-bindir")) for flag in flags
    ):
        argv += ["-ccbin", plan.host.program]
    argv += gencode_flags(plan.archs.archs)
    if len(plan.archs.archs) > 1:
        argv += ["--threads", str(min(len(plan.archs.archs), jobs))]
    if plan.debug:
        # -G implies -lineinfo; nvcc and ptxas warn if both are given.
        argv += ["-G", "-g", "-O0", "--keep", "--keep-dir", f"{stem}{KEPT}"]
    elif jobs > 1 and _release(nvcc.version) >= (12, 2):
        # Saves a quarter of the time for the largest modules. Register counts then depend slightly
        # on how the threads divide the work.
        argv.append("--split-compile=2")
    argv += [] if plan.debug else ["-O3", "-lineinfo"]
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


def _cxx_command(
    plan: Plan, extension: str | None, source: str, stem: str, scan: IncludeScan
) -> list[str]:
    flags = [f for f in plan.request.cxx_flags if not f.startswith(_LINKER_FLAGS)]
    launcher = () if plan.host.is_wrapped else plan.launcher
    argv = [*launcher, *plan.host.command, "-c", source, "-o", f"{stem}.o"]
    if names_incbins(plan):
        argv.append(f"-Wa,--MD,{stem}.as.d")
    argv += ["-MD", "-MF", f"{stem}.d", *(["-O0", "-g"] if plan.debug else ["-O2"])]
    argv += _host_flags(plan)
    if extension is not None:
        argv.append(f"-DTORCH_EXTENSION_NAME={extension}")
    if scan.torch:
        argv.append("-DTORCH_API_INCLUDE_EXTENSION_H")
    else:
        argv.append(f"-D{_TARGET_MACRO}={STABLE_TARGET}")
    if not _sets_standard(flags):
        argv.append("-std=c++20")
    for directory in plan.include_dirs:
        argv += ["-I", directory]
    cuda = plan.nvcc.include_dirs if plan.nvcc else ()
    if scan.torch:
        cuda += wheel_include_dirs()
    for directory in (*torch_install().include_dirs, python_include_dir(), *cuda):
        argv += ["-isystem", directory]
    return [*argv, *flags]


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split()[0].split(".")[:2])


def _sets_standard(flags: tuple[str, ...] | list[str]) -> bool:
    return any(flag.startswith(("-std", "--std")) for flag in flags)


def compiler_environment() -> dict[str, str]:
    """The environment of the compilers: English messages, temporary files in their directory."""
    # ccache takes -gencode for -g, and would not find what another staging directory compiled.
    return {"CCACHE_NOHASHDIR": "1", **os.environ, "LC_ALL": "C.UTF-8", "TMPDIR": "."}


def linker_flags(plan: Plan, units: list[Unit]) -> list[str]:
    """What to link besides torch's own libraries."""
    flags = [*plan.host.flags]
    flags += [f for f in plan.request.cxx_flags if f.startswith(_LINKER_FLAGS)]
    if torch_install().cuda and any(unit.scan.torch for unit in units):
        flags += ["-lc10_cuda", "-ltorch_cuda"]
    if plan.nvcc is not None:
        flags += cudart_flags(plan.nvcc)
    return [*flags, *cxx_runtime_flags(plan.host)]


def build(
    plan: Plan,
    extension: str,
    staging: Path,
    *,
    jobs: int,
    slots: threading.Semaphore,
    shared: SharedObjects,
    kept: Path,
    on_tick: Callable[[list[str]], None],
    write_log: Callable[[str], Path | None],
    warn: Callable[[str], None],
) -> Built:
    """Compile, link and try to load in ``staging``. Objects for other modules are in ``kept``.

    Raises:
        CompileError: a compiler or the linker failed.
        LoaderError: the library was built but does not load.
        OSError: a file cannot be written, or a compiler not started.
    """
    units = make_units(plan, extension, staging, jobs)
    own = [unit for unit in units if not unit.shared]
    env = compiler_environment()
    prepare = _in_background(_import_torch_extension_tools)
    paths = _in_background(
        lambda: [_include_path(unit, plan.launcher, env, staging) for unit in own]
    )
    with_others = [
        _in_background(partial(_compile_shared, plan, unit, shared, kept, slots, env, staging))
        for unit in units
        if unit.shared
    ]
    finished = run_side_by_side(
        [unit.command for unit in own], slots=slots, env=env, cwd=staging, on_tick=on_tick
    )
    read: list[includes.Unit] = []
    if all(item.returncode == 0 for item in finished):
        for compiled in (waiting.result() for waiting in with_others):
            read.append(compiled.unit)
            finished += [compiled.finished] if compiled.finished else []
    kernels: list[KernelUsage] = []
    said: list[tuple[str, str]] = []
    for item in finished:
        used, text = split_usage(item.text)
        kernels += used
        if item.returncode != 0:
            _raise_if_disk_is_full(text, staging)
            raise compile_error(
                plan.name,
                label=item.command.label,
                command=item.command.argv,
                returncode=item.returncode,
                text=text,
                root=staging,
                log_path=write_log(f"$ {shlex.join(item.command.argv)}\n{text}"),
            )
        if text := text.strip():
            said.append((item.command.label, text))
    for label, text in said:
        warn(f"{plan.name}: {label} said:\n{text}")
    for unit in own:
        _refuse_hidden_exports(plan, unit.source, staging / unit.output)
    prepare.result()
    linking = time.monotonic()
    try:
        trial = link_and_try(
            extension,
            staging,
            sources=plan.sources,
            compiler=plan.host.program,
            objects=[unit.output for unit in units],
            flags=linker_flags(plan, units),
            on_tick=lambda: on_tick(["linker"]),
        )
    except CompileError as error:
        _raise_if_disk_is_full(str(error), staging)
        log = write_log(str(error))  # with the commands
        raise compile_error(
            plan.name,
            label="linking",
            command=error.command,
            returncode=1,
            text=str(error),
            root=staging,
            log_path=log,
        ) from None
    read += [
        includes.Unit(unit.source, _read_by(unit, staging), path)
        for unit, path in zip(own, paths.result(), strict=True)
    ]
    steps = [(item.command.label, item.seconds) for item in finished]
    steps.append(("linking and first load", time.monotonic() - linking))
    library = staging / f"{extension}.so"
    request = plan.request
    stable = (
        not any(unit.scan.torch for unit in units)
        and not any(_TARGET_MACRO in flag for flag in (*request.cuda_flags, *request.cxx_flags))
        and links_stable(library)
    )
    linked, searched = _linked(plan, env)
    return Built(
        library, tuple(read), linked, searched, trial, tuple(steps), tuple(kernels), stable
    )


def _in_background(call: Callable[[], _T]) -> Future[_T]:
    """The result of ``call``, which runs in a thread that does not outlive the process."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _compile_shared(
    plan: Plan,
    unit: Unit,
    shared: SharedObjects,
    kept: Path,
    slots: threading.Semaphore,
    env: Mapping[str, str],
    staging: Path,
) -> Compiled:
    """The object of ``unit``, compiled here unless a build before this one has done so."""

    def compile_it() -> Compiled:
        path = _in_background(lambda: _include_path(unit, plan.launcher, env, staging))
        (finished,) = run_side_by_side(
            [unit.command], slots=slots, env=env, cwd=staging, on_tick=lambda _: None
        )
        read = (unit.source, *_read_by(unit, staging))
        return Compiled(includes.Unit(unit.source, read, path.result()), finished)

    inputs = [plan.inputs[name] for name in ("host_compiler", "environment", "torch", "machine")]
    name = f"{digest_of([unit.command.argv, *inputs])[:32]}.o"
    return shared.get(kept / name, staging / unit.output, plan.roots, compile_it)


def _include_path(
    unit: Unit, launcher: tuple[str, ...], env: Mapping[str, str], staging: Path
) -> includes.IncludePath:
    is_nvcc = unit.source.lower().endswith(CUDA_SUFFIXES)
    argv = unit.command.argv
    if launcher and argv[: len(launcher)] == launcher:
        argv = argv[len(launcher) :]
    return include_path(argv, unit.source, is_nvcc=is_nvcc, env=env, cwd=staging)


def _read_by(unit: Unit, staging: Path) -> tuple[str, ...]:
    """What the depfiles of a unit list: of the compiler, of nvcc's own host compiler, of `as`."""
    inside = os.path.join(staging, "")
    read: dict[str, None] = {}
    for depfile in unit.depfiles:
        try:
            listed = parse_depfile(depfile.read_text(errors="surrogateescape"))
        except FileNotFoundError:
            continue
        for path in listed:
            full = os.path.join(staging, path)
            # What the compilers made for each other, there or elsewhere, is gone by now.
            if full != unit.source and not full.startswith(inside) and os.path.exists(full):
                read.setdefault(full)
    return tuple(read)


def _linked(
    plan: Plan, env: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[includes.Searched, ...]]:
    """Files that no depfile lists, and where the linker looked for libraries."""
    named = named_by([*plan.host.flags, *all_flags(plan.request, env)])

    def find(name: str) -> str:
        return ask([*plan.host.command, f"-print-file-name={name}"], env).strip()

    archives, searched = libraries_of(named.words, find, plan.roots.place)
    cudart = [plan.nvcc.cudart] if plan.nvcc and plan.nvcc.cudart.endswith(".a") else []
    return (*cudart, *named.files, *archives), tuple(searched)


def _refuse_hidden_exports(plan: Plan, source: str, compiled: Path) -> None:
    """Reject a JITQUANT_EXPORT that the compiler has seen but that was not found in the source."""
    if not source.lower().endswith(CUDA_SUFFIXES):
        return
    found = {name.decode() for name in _EXPORTED.findall(compiled.read_bytes())}
    bound = {export.launcher for binding in plan.bindings for export in binding.exports}
    for launcher in sorted(found - bound):
        raise unusable_export(
            plan.name,
            source,
            f"that of {launcher} is in a header or in another macro, where the loader does not "
            f"look: it reads only {os.path.basename(source)}. Write it there",
        )


def _raise_if_disk_is_full(text: str, staging: Path) -> None:
    """Raise `OSError` if a command failed because the disk is full, even if it does not say so.

    nvcc, for example, hides what the host compiler says about its first temporary file.
    """
    for number in (errno.ENOSPC, errno.EDQUOT):
        if os.strerror(number) in text:
            raise OSError(number, os.strerror(number), str(staging))
    if not any(found.is_error and found.file for found in parse(text, staging)):
        with tempfile.NamedTemporaryFile(dir=staging) as probe:
            probe.write(bytes(_PROBE_BYTES))


def _import_torch_extension_tools() -> None:
    """Import torch's extension tools (a fifth of a second) while the compilers run."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.suppress(ImportError):
            import torch.utils.cpp_extension  # noqa: F401
    finally:
        logger.setLevel(level)
