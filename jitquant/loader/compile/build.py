"""From a plan to a shared library: compile in parallel, link, try to load."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..diagnostics import compile_error, parse
from ..errors import CompileError
from ..machine.memo import Memo
from ..machine.processes import Command, Finished, run_side_by_side
from ..machine.torch_install import torch_install
from ..request import includes, searches
from ..request.exports import unusable_export
from ..request.key import digest_of
from ..request.named import library_places, named_by, thin_members
from ..request.plan import Plan, all_flags
from .commands import (
    LINKED,
    TARGET_MACRO,
    Unit,
    compiler_environment,
    linker_flags,
    make_units,
)
from .listing import compile_units, read_by
from .search import files_in, include_path
from .shared import Compiled, SharedObjects
from .trial import Trial, link_and_try
from .usage import KernelUsage, split_usage

_PROBE_BYTES = 1 << 16
_T = TypeVar("_T")
#: Names of C++ in a namespace of torch, and of C in torch's Python bindings. The functions of the
#: stable ABI are aoti_torch_* and torch_*, in C.
_UNSTABLE = re.compile(r" (?:THP\w+|_Z\w*?N[VKRO]*(?:3c10|2at|5torch|6caffe2)\w*)(?:@|$)", re.M)
#: The functions that the macro defines, in the table of an object's symbols.
_EXPORTED = re.compile(rb"\0jitquant_export_(\w+)(?=\0)")


@dataclass(frozen=True)
class Built:
    """A linked library, the files and directories that the compilers read, and their output.

    ``linked`` is what the linker has read, ``searched`` where all of them searched, and ``twins``
    are files that may have been left out as they are the same as others.

    ``steps`` are the seconds of each command; the compilers run in parallel. ``stable`` is whether
    it uses torch only through its stable ABI.
    """

    library: Path
    units: tuple[searches.Unit, ...]
    linked: tuple[str, ...]
    searched: list[includes.Searched]
    twins: tuple[str, ...]
    trial: Trial
    steps: tuple[tuple[str, float], ...]
    kernels: tuple[KernelUsage, ...]
    stable: bool


def build(
    plan: Plan,
    extension: str,
    staging: Path,
    *,
    jobs: int,
    slots: threading.Semaphore,
    memo: Memo,
    shared: SharedObjects,
    kept: Path,
    on_tick: Callable[[list[str]], None],
    write_log: Callable[[str], Path | None],
    warn: Callable[[str], None],
) -> Built:
    """Compile, link and try to load in ``staging``. Objects for other modules are in ``kept``.

    Raises:
        CompileError: a compiler or the linker failed.
        FirstLoadError: the library was built but does not load.
        OSError: a file cannot be written, or a compiler not started.
    """
    units = make_units(plan, extension, staging, jobs)
    own = [unit for unit in units if not unit.shared]
    env = compiler_environment()
    named = named_by([*plan.host.flags, *all_flags(plan.request, env)])

    def path_of(unit: Unit) -> searches.IncludePath:
        argv = unit.direct.argv
        path = include_path(argv, unit.source, is_nvcc=unit.is_cuda, env=env, cwd=staging)
        if path is None:
            raise CompileError(
                f"module {plan.name!r}: {argv[0]} does not say where it searches for headers"
                f"{' (--dryrun)' if unit.is_cuda else ''}, as GCC and clang do with -v, so a new "
                "header that comes first would go unseen. Set CXX or CUDA_HOME to another "
                "compiler, or have its wrapper pass on all arguments."
            )
        return path._replace(tools=(*path.tools, *named.files))

    def paths_of_own() -> list[searches.IncludePath]:
        found = [path_of(unit) for unit in own]
        for tool in dict.fromkeys(tool for path in found for tool in path.tools):
            memo.state(tool)  # half a second if none is known, while the compilers run
        return found

    prepare = _in_background(_import_torch_extension_tools)
    paths = _in_background(paths_of_own)

    def run(
        commands: Sequence[Command],
        tick: Callable[[list[str]], None],
        after: Sequence[threading.Event],
    ) -> list[Finished]:
        """Runs ``commands``, those of nvcc at once and others once ``after`` has happened."""
        nvcc = {unit.command.label for unit in own if unit.is_cuda}
        return run_side_by_side(
            commands,
            slots=slots,
            env=env,
            cwd=staging,
            on_tick=tick,
            may_start=lambda command: command.label in nvcc or all(e.is_set() for e in after),
        )

    def compile_shared(
        unit: Unit, begun: threading.Event, after: list[threading.Event]
    ) -> Compiled:
        """The object of ``unit``, compiled here unless a build before this one has done so."""

        def tick(labels: list[str]) -> None:
            if labels:
                begun.set()
            if not staging.is_dir():  # the build has failed meanwhile, or was interrupted
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(staging))

        def compile_it() -> Compiled:
            path = _in_background(lambda: path_of(unit))
            done = compile_units(plan, [unit], staging, memo, partial(run, tick=tick, after=after))
            read = (unit.source, *read_by(unit, staging, plan.roots))
            return Compiled(searches.Unit(unit.source, read, path.result()), done[-1])

        keys = ("host_compiler", "launcher", "environment", "torch", "machine")
        inputs = [plan.inputs.get(key) for key in keys]
        name = f"{digest_of([unit.command.argv, *inputs])[:32]}.o"
        try:
            return shared.get(kept / name, staging / unit.output, plan.roots, compile_it)
        finally:
            begun.set()

    # What takes longest begins first: nvcc, the shared objects, then this module's binding.
    longest_first = sorted(
        (unit for unit in units if unit.shared), key=lambda unit: -len(unit.scan.files)
    )
    begun = [threading.Event() for _ in longest_first]
    with_others = [
        _in_background(partial(compile_shared, unit, begun[i], begun[:i]))
        for i, unit in enumerate(longest_first)
    ]
    finished = compile_units(
        plan,
        own,
        staging,
        memo,
        partial(run, tick=on_tick, after=begun),
        lambda: [tool for path in paths.result() for tool in path.tools],
    )
    read: list[searches.Unit] = []
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
            log = write_log(f"$ {shlex.join(item.command.argv)}\n{text}")
            raise compile_error(plan.name, item.command[:2], item.returncode, text, staging, log)
        if text := text.strip():
            said.append((item.command.label, text))
    for label, text in said:
        warn(f"{plan.name}: {label} said:\n{text}")
    for unit in own:
        _refuse_hidden_exports(plan, unit.source, staging / unit.output)
    read += [
        searches.Unit(unit.source, read_by(unit, staging, plan.roots), path)
        for unit, path in zip(own, paths.result(), strict=True)
    ]
    prepare.result()
    linking = time.monotonic()
    forked = threading.Event()

    def search() -> tuple[list[includes.Searched], list[str]]:
        forked.wait()  # a fork is safer without threads that work
        return searches.searched_by(read, plan.roots)

    def on_linking() -> None:
        forked.set()
        on_tick(["linker"])

    searching = _in_background(search)  # a fifth of a second, while the linker runs
    try:
        trial = link_and_try(
            extension,
            staging,
            sources=plan.sources,
            compiler=plan.host.program,
            objects=[unit.output for unit in units],
            flags=linker_flags(plan, units),
            on_tick=on_linking,
        )
    except CompileError as error:
        _raise_if_disk_is_full(str(error), staging)
        log = write_log(str(error))  # with the commands
        linker = (error.command, "linking")
        raise compile_error(plan.name, linker, 1, str(error), staging, log) from None
    finally:
        forked.set()
    steps = [(item.command.label, item.seconds) for item in finished]
    steps.append(("linking and first load", time.monotonic() - linking))
    library = staging / f"{extension}.so"
    request = plan.request
    stable = (
        not any(unit.scan.torch for unit in units)
        and not any(TARGET_MACRO in flag for flag in (*request.cuda_flags, *request.cxx_flags))
        and _links_stable(library)
    )
    places = [*library_places(named.words), *env.get("LIBRARY_PATH", "").split(os.pathsep)]
    places += [place for path in paths.result() for place in path.tool_places]
    linked, by_linker = _linked(plan, staging, list(dict.fromkeys(places)))
    searched, twins = searching.result()
    # A generated binding is here, beside nothing that it could find, and no other build is.
    inside = os.path.join(staging, "")
    searched = [one for one in searched if one.places != [inside]]
    return Built(
        library,
        tuple(read),
        linked,
        [*searched, *by_linker],
        tuple(twins),
        trial,
        tuple(steps),
        tuple(kernels),
        stable,
    )


def _links_stable(library: Path) -> bool:
    """Whether ``library`` uses torch only through its stable ABI.

    ``False`` if that is unknown, because binutils' nm is missing.
    """
    program = shutil.which("nm") or shutil.which("llvm-nm")
    if program is None:
        return False
    try:
        listed = subprocess.run(
            [program, "-D", "--undefined-only", str(library)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return _UNSTABLE.search(listed) is None


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


def _linked(
    plan: Plan, staging: Path, places: Sequence[str]
) -> tuple[tuple[str, ...], tuple[includes.Searched, ...]]:
    """What the linker read, except for torch's libraries, and where it searched in ``places``."""
    listed = [plan.nvcc.cudart] if plan.nvcc and plan.nvcc.cudart.endswith(".a") else []
    if not (staging / LINKED).exists():
        return tuple(listed), ()
    text = (staging / LINKED).read_text(errors="surrogateescape")
    listed += re.findall(r"^ +(\S.*?)(?: \\)?$", text, re.MULTILINE)
    elsewhere = (os.path.join(staging, ""), os.path.join(torch_install().library_dir, ""))
    found = files_in([str(staging), *places], dict.fromkeys(listed))
    read = [path for path in found if not path.startswith(elsewhere)]
    read += [member for path in read for member in thin_members(path)]
    names = {os.path.basename(path) for path in read}
    names |= {os.path.splitext(name)[0] + suffix for name in names for suffix in (".a", ".so")}
    named = [plan.roots.place(place) for place in places if os.path.isabs(place)]
    return tuple(read), (includes.Searched(named, dict.fromkeys(sorted(names), len(named))),)


def _refuse_hidden_exports(plan: Plan, source: str, compiled: Path) -> None:
    """Reject a JITQUANT_EXPORT that the compiler has seen but that was not found in the source."""
    found = {name.decode() for name in _EXPORTED.findall(compiled.read_bytes())}
    bound = {export.launcher for binding in plan.bindings for export in binding.exports}
    for launcher in sorted(found - bound):
        raise unusable_export(
            plan.name,
            source,
            f"that of {launcher} is in a header, in another macro or in a C++ source, where the "
            "loader does not look. Write it in a .cu itself",
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
