"""Links a module and loads it for the first time, in a forked child.

A library that throws while it is loaded (an invalid operator schema, a namespace that is already
registered, a failing static initializer) terminates its process. So the first load runs in a
child, which has torch in memory already; its output becomes the error message.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import CompileError, FirstLoadError
from ..machine.processes import kill_group
from ..machine.toolchain import find_ninja
from ..store.hold import Hold
from .advice import advice

_HANG_SECONDS = 25.0
_TOTAL_SECONDS = 300.0
_PR_SET_PDEATHSIG = 1
_UNQUOTABLE = re.compile(r"[^\w ./+,=@~%-]")
_UNQUOTED = re.compile(r"[^\w./+,=@~%-]")  # where torch passes a path through a shell as it is
_FAILED = re.compile(r"^FAILED: .*\n(.+)$", re.MULTILINE)
#: Ended by its alarm if the load hangs; torch may take its time before that.
_LOAD = """\
import json, signal, sys
library, answer, seconds, *sys.path = sys.argv[1:]
import torch
from pathlib import Path
from jitquant.loader.compile.trial import load_once
signal.setitimer(signal.ITIMER_REAL, float(seconds))
try:
    result = load_once(library)
except BaseException as error:
    result = {"stage": "load", "error": str(error.__cause__ or error)}
signal.setitimer(signal.ITIMER_REAL, 0)
Path(answer).write_text(json.dumps(result))
"""
_STUB = "// Links the objects that were compiled beside this file.\n"


@dataclass(frozen=True)
class Trial:
    """What the first load showed: the operators it registered, the Python modules it contains."""

    ops: list[str]
    init_symbols: list[str]


def link_and_try(
    extension: str,
    staging: Path,
    *,
    sources: Sequence[str],
    compiler: str,
    objects: Sequence[str],
    flags: Sequence[str],
    on_tick: Callable[[], None],
) -> Trial:
    """Link ``staging/<extension>.so`` with ``torch.utils.cpp_extension.load`` and load it once.

    Raises:
        CompileError: the linker failed; the text is its output.
        FirstLoadError: the library does not load.
    """
    stub = staging / f"{extension}.cpp"
    stub.write_text(_STUB)
    library = staging / f"{extension}.so"
    outcome = _in_child(
        lambda: _link_and_load(extension, staging, stub, compiler, objects, flags), library, on_tick
    )
    return _read_outcome(outcome, staging, library, sources)


def try_load(library: Path, held: Hold, scratch: Path, sources: Sequence[str]) -> None:
    """Load a finished library in a child, to check that this process can."""
    outcome = _in_child(lambda: load_once(held.path), library, lambda: None, keep=held.descriptor)
    _read_outcome(outcome, scratch, library, sources)


def init_symbols_of(library: str) -> list[str]:
    """The Python modules that a library can be imported as (its ``PyInit_`` symbols)."""
    names = re.findall(rb"\0PyInit_(\w+)(?=\0)", Path(library).read_bytes())
    return sorted({name.decode() for name in names})


@dataclass(frozen=True)
class _Outcome:
    result: dict[str, Any]
    code: int
    output: str
    timed_out: bool


def _read_outcome(outcome: _Outcome, staging: Path, library: Path, sources: Sequence[str]) -> Trial:
    if outcome.timed_out and library.is_file():
        outcome = _in_new_process(library, staging)
    result = outcome.result
    # torch 2.11 only prints what goes wrong in a registration, and leaves the operator out.
    if "ops" in result and "Exception in aoti_torch" not in outcome.output:
        return Trial(list(result["ops"]), list(result["init"]))
    if result.get("stage") == "link":
        said = str(result["error"])
        raise CompileError(said, command=_failed_command(said))
    if outcome.timed_out:
        raise FirstLoadError(
            f"the library {library.stem!r} was built, but loading it hangs: a static initializer "
            f"or a registration was still running after {_HANG_SECONDS:.0f} s. Look there for an "
            "endless loop or a deadlock."
        )
    said = str(result["error"]) if "error" in result else _last_words(outcome.output)
    how = "" if result else f" ({_describe_exit(outcome.code)})"
    hint = advice(f"{how} {said}", sources)
    raise FirstLoadError(
        f"the library {library.stem!r} was built but does not load{how}:\n{said}"
        + (f"\n{hint}" if hint else "")
    )


def _failed_command(said: str) -> list[str]:
    """The command that ninja reports as failed; ``[]`` if it reports none."""
    match = _FAILED.search(said)
    try:
        return shlex.split(match[1]) if match else []
    except ValueError:
        return []


def _describe_exit(code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"the process that tried it got {signal.Signals(-code).name}"
    return f"the process that tried it ended with status {code}"


def _last_words(output: str) -> str:
    text = re.split(r"Fatal Python error|Exception raised from|C\+\+ CapturedTraceback", output)[0]
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return "\n".join(lines[-12:]) if lines else "(it printed nothing)"


def _in_child(
    work: Callable[[], dict[str, Any]],
    library: Path,
    on_tick: Callable[[], None],
    keep: int = -1,
) -> _Outcome:
    """Run ``work`` in a forked child that can neither hang nor terminate this process."""
    # In memory: on a full disk the message that says so would be lost.
    log = os.memfd_create("trial")
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        _child(work, log, writer, keep)
    os.close(writer)
    done = False
    status, timed_out = 0, False
    try:
        started = time.monotonic()
        linked: float | None = None
        while True:
            try:
                ended, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                # Somebody else in this process waits for every child; the pipe tells the result.
                ended = pid
            if ended:
                done = True
                break
            now = time.monotonic()
            if linked is None and library.is_file():
                linked = now
            if now - started > _TOTAL_SECONDS or (linked and now - linked > _HANG_SECONDS):
                timed_out = True
                break
            on_tick()
            time.sleep(0.005)
    finally:
        if not done:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        with open(reader, "rb") as pipe:
            os.set_blocking(pipe.fileno(), False)
            raw = pipe.read() or b"{}"
        with open(log, "rb") as stream:
            stream.seek(0)
            output = stream.read().decode(errors="replace")
    result = {}
    with contextlib.suppress(ValueError):
        result = json.loads(raw)
    return _Outcome(result, os.waitstatus_to_exitcode(status), output, timed_out)


def _in_new_process(library: Path, scratch: Path) -> _Outcome:
    """Load a library that hung in a forked child where no lock of another thread was held."""
    result = {}
    with tempfile.TemporaryDirectory(dir=scratch) as name, open(f"{name}/log", "w+b") as log:
        answer = f"{name}/answer"
        argv = [sys.executable, "-c", _LOAD, str(library), answer, str(_HANG_SECONDS), *sys.path]
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TOTAL_SECONDS)
        finally:
            if process.returncode is None:
                kill_group(process.pid)
            code = process.wait()
        with contextlib.suppress(OSError, ValueError), open(answer, "rb") as stream:
            result = json.load(stream)
        log.seek(0)
        said = log.read().decode(errors="replace")
    return _Outcome(result, code, said, code in (-signal.SIGALRM, -signal.SIGKILL))


def _child(work: Callable[[], dict[str, Any]], log: int, writer: int, keep: int) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # Not least the build lock: a child must not go on holding it when its parent dies.
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in (writer, keep):
                with contextlib.suppress(OSError):
                    os.close(int(name))
        os.write(writer, json.dumps(work()).encode())
        code = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            stage = "link" if isinstance(error, _LinkError) else "load"
            # torch says which library; the cause says why.
            text = str(error.__cause__ or error) or type(error).__name__
            os.write(writer, json.dumps({"stage": stage, "error": text[-20000:]}).encode())
    finally:
        os._exit(code)


class _LinkError(Exception):
    """The linker's output."""


def _link_and_load(
    extension: str,
    staging: Path,
    stub: Path,
    compiler: str,
    objects: Sequence[str],
    flags: Sequence[str],
) -> dict[str, Any]:
    import torch
    from torch.utils import cpp_extension

    # Behind all others, for the ninja of the PyPI package.
    if ninja := find_ninja()[0]:
        places = (os.environ.get("PATH", os.defpath), os.path.dirname(ninja))
        os.environ["PATH"] = os.pathsep.join(places)
    os.environ["TMPDIR"] = "."
    os.environ["LC_ALL"], os.environ["LANGUAGE"] = "C.UTF-8", ""
    os.environ["CXX"] = compiler
    os.environ["TORCH_NO_COMPILER_WRAPPER"] = "1"  # no ccache that happens to be on PATH
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    place = staging
    if _UNQUOTABLE.search(str(staging)):
        # torch does not quote paths for ninja.
        place = Path(_plain_path(staging))
    if _UNQUOTED.search(cpp_extension.TORCH_LIB_PATH):
        cpp_extension.TORCH_LIB_PATH = _plain_path(cpp_extension.TORCH_LIB_PATH)  # this child's own
    before = set(torch._C._dispatch_get_all_op_names())
    library = staging / f"{extension}.so"
    try:
        cpp_extension.load(
            extension,
            [str(place / stub.name)],
            # In a line of a ninja file that a shell reads.
            extra_ldflags=[shlex.quote(flag).replace("$", "$$") for flag in (*objects, *flags)],
            build_directory=str(place),
            is_python_module=False,
            verbose=False,
        )
    except BaseException as error:
        if not library.is_file():
            raise _LinkError(str(error)) from None
        raise
    return _import_all(str(library), before)


def _plain_path(directory: str | os.PathLike[str]) -> str:
    """A path to ``directory`` without special characters, valid while this process lives."""
    return f"/proc/{os.getpid()}/fd/{os.open(directory, os.O_PATH)}"


def load_once(library: str) -> dict[str, Any]:
    """Load the library at a path into this process, and report its contents."""
    import torch

    before = set(torch._C._dispatch_get_all_op_names())
    ctypes.CDLL(library)  # torch would look for the name behind a descriptor
    return _import_all(library, before)


def _import_all(library: str, before: set[str]) -> dict[str, Any]:
    import torch

    from ..module import import_extension

    init = init_symbols_of(library)
    for name in init:
        import_extension(name, library)
    after = set(torch._C._dispatch_get_all_op_names())
    return {"ops": sorted(after - before), "init": init}
