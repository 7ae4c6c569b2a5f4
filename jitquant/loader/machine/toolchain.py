"""Finds nvcc and the host compiler, and their versions.

Answers of compilers are cached (:class:`Memo`) until the files they depend on change.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import HostCompilerNotFoundError, NvccNotFoundError, extra
from .memo import Memo
from .processes import ask

#: What runs nvcc and the host compiler.
LAUNCHER = "JITQUANT_NVCC_LAUNCHER"
#: What changes the answer of a compiler, and is not part of the question.
_ADDS_TO_COMMANDS = (
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "INCLUDES", "SYSTEM_INCLUDES", "LIBRARIES"),
    *("CPATH", "CPLUS_INCLUDE_PATH"),
)
_WRAPPERS = ("ccache", "sccache", "distcc", "icecc")


class Nvcc(NamedTuple):
    """A CUDA compiler: the real binary, its version, and the toolkit around it.

    ``command`` is what is run: a wrapper if one was found (a script with its own flags, or ccache
    named nvcc), whose digest is ``wrapper`` then; otherwise the binary. ``keeps_objects`` is
    whether the wrapper is or runs ccache or sccache. ``looked_at`` are the paths where it was
    looked for, its own last.
    """

    path: str
    command: str
    wrapper: str
    version: str
    origin: str
    include_dirs: tuple[str, ...]
    cudart: str
    archs: tuple[int, ...]
    keeps_objects: bool = False
    looked_at: tuple[str, ...] = ()

    @property
    def cudart_name(self) -> str:
        """File name of the CUDA runtime: the static library, or the shared one's soname."""
        return os.path.basename(self.cudart)


class HostCompiler(NamedTuple):
    """A C++ compiler: command (``CXX`` may hold a wrapper) and version.

    ``scripts`` are the digests of its programs that are scripts, and may add flags of their own.
    """

    command: tuple[str, ...]
    version: str
    scripts: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        """The compiler itself, without a wrapper such as ccache and without flags."""
        return self.command[self._wrapped]

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags in ``CXX`` after the compiler."""
        return self.command[self._wrapped + 1 :]

    @property
    def wrapper(self) -> tuple[str, ...]:
        """The wrapper that ``CXX`` names, such as ccache; or ``()``."""
        return self.command[: self._wrapped]

    @property
    def _wrapped(self) -> int:
        return int(os.path.basename(self.command[0]) in _WRAPPERS and len(self.command) > 1)


def script_in(program: str) -> str:
    """The digest of a program that is a script; ``""`` if it is not."""
    with contextlib.suppress(OSError), open(program, "rb") as stream:
        if stream.read(2) == b"#!":
            return hashlib.sha256(stream.read()).hexdigest()
    return ""


def _ask(argv: Sequence[str]) -> str:
    """The output of a compiler in the C locale, without variables that change from build to build.

    Because answers are cached.
    """
    env = {k: v for k, v in os.environ.items() if k not in _ADDS_TO_COMMANDS}
    return ask(argv, env | {"LC_ALL": "C", "LANGUAGE": ""})


def wheel_roots() -> list[str]:
    """The directories of NVIDIA's PyPI wheels, if any are installed."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    return list(spec.submodule_search_locations or ()) if spec else []


def _in_wheels(name: str) -> str | None:
    """A program of the PyPI wheels in this interpreter's environment; of CUDA 13 before 12's."""
    for pattern in (f"cu[0-9]*/bin/{name}", f"*/bin/{name}"):
        for root in wheel_roots():
            if found := sorted(Path(root).glob(pattern), reverse=True):
                return str(found[0])
    return None


def program_places(name: str, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Where a program of CUDA may be, with the origin, in order; the path may not exist."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(variable):
            yield os.path.join(env[variable], "bin", name), f"{variable}={env[variable]}"
    if wheel := _in_wheels(name):
        yield wheel, "the PyPI wheels"
    if on_path := shutil.which(name, path=env.get("PATH")):
        yield on_path, "PATH"
    yield f"/usr/local/cuda/bin/{name}", "/usr/local/cuda"


class Candidate(NamedTuple):
    """A place where nvcc may be; if ``nvcc`` is ``None``, ``why_not`` gives the reason."""

    path: str
    origin: str
    exists: bool
    nvcc: Nvcc | None
    why_not: str = ""


def examine_nvccs(memo: Memo, env: Mapping[str, str] = os.environ) -> Iterator[Candidate]:
    """All places where nvcc may be, in order of preference: the first that works is used."""
    host = ""
    with contextlib.suppress(HostCompilerNotFoundError):
        host = find_host_compiler(memo, env).program
    for path, origin in program_places("nvcc", env):
        if not (os.path.isfile(path) and os.access(path, os.X_OK)):
            yield Candidate(path, origin, False, None, f"no {path}")
            continue
        question = f"nvcc 13 {os.path.abspath(path)} {host}"
        answer = memo.answer(question, partial(_probe_nvcc, path, host))
        if "failed" not in answer and not answer["cudart"]:
            answer["failed"] = "its toolkit has no libcudart (nvidia-cuda-runtime in PyPI)"
        if "failed" in answer:
            why_not = f"{path} does not work: {answer['failed']}"
            yield Candidate(path, origin, True, None, why_not)
            continue
        # Lists, since answers are kept as JSON.
        lists = {key: tuple(answer[key]) for key in ("include_dirs", "archs")}
        nvcc = Nvcc(**{**answer, **lists}, origin=origin)
        yield Candidate(path, origin, True, nvcc)


def find_nvcc(memo: Memo, env: Mapping[str, str] = os.environ) -> tuple[Nvcc, tuple[str, ...]]:
    """The nvcc to use, and notes about settings that do not lead to one.

    Order: ``CUDA_HOME``, ``CUDA_PATH``, the PyPI wheel, ``PATH``, ``/usr/local/cuda``.
    """
    tried: list[str] = []
    notes: list[str] = []
    paths: list[str] = []
    for candidate in examine_nvccs(memo, env):
        paths.append(candidate.path)
        if candidate.nvcc is not None:
            return candidate.nvcc._replace(looked_at=tuple(paths)), tuple(notes)
        tried.append(f"{candidate.origin}: {candidate.why_not}")
        if candidate.exists:
            notes.append(f"{candidate.path} ({candidate.origin}) does not work")
        elif "=" in candidate.origin:
            notes.append(f"{candidate.origin} has no bin/nvcc")
    looked = "\n".join(f"  - {line}" for line in tried)
    raise NvccNotFoundError(
        "no CUDA compiler (nvcc) was found. Looked at, in this order:\n"
        f"{looked}\n"
        "  - CUDA_HOME, CUDA_PATH, the PyPI wheel and PATH name none besides these\n"
        f"Install {extra('nvcc')}, or set CUDA_HOME to a CUDA toolkit "
        "(12.8 or newer for 10.0 and 12.0)."
    )


def _probe_nvcc(path: str, host: str) -> tuple[dict[str, Any], list[str]]:
    output = _ask([path, "--version"])
    release = re.search(r"\bV(\d+\.\d+\.\d+)", output)
    if release is None:
        return {"failed": output.strip()[-300:] or "it does not run"}, []
    # The dry run of a wrapper script shows which toolkit it wraps. It runs the host compiler.
    chosen = ["-ccbin", host] if host else []
    dry = _ask([path, "--dryrun", *chosen, "-c", "x.cu", "-o", "x.o"])
    here = re.search(r"^#\$ _HERE_=(.*)$", dry, re.MULTILINE)
    binary = os.path.realpath(path)
    if here and os.path.isfile(os.path.join(here.group(1).strip(), "nvcc")):
        binary = os.path.realpath(os.path.join(here.group(1).strip(), "nvcc"))
    root = os.path.dirname(os.path.dirname(binary))
    includes = [
        *re.findall(r'"-I([^"]+)"', dry),
        os.path.join(root, "include"),
        *re.findall(r'"-isystem" "([^"]+)"', dry),
    ]
    libs = [*re.findall(r'"-L([^"]+)"', dry), *(os.path.join(root, d) for d in ("lib64", "lib"))]
    archs = sorted({int(n) for n in re.findall(r"compute_(\d+)", _ask([path, "--list-gpu-arch"]))})
    assembler = os.path.join(os.path.dirname(binary), "ptxas")
    ptxas = re.search(r"\bV(\d+\.\d+\.\d+)", _ask([assembler, "--version"]))
    version = release.group(1)
    if ptxas and ptxas.group(1) != version:
        version += f" (ptxas {ptxas.group(1)})"
    wrapped = os.path.realpath(path) != binary
    wrapper = Path(path).read_bytes() if wrapped else b""
    answer = {
        "path": binary,
        "command": os.path.abspath(path) if wrapped else binary,
        "wrapper": hashlib.sha256(wrapper).hexdigest() if wrapped else "",
        "keeps_objects": b"ccache" in wrapper,
        "version": version,
        "include_dirs": _existing(*includes),
        "cudart": _find_cudart([d for d in _existing(*libs) if not d.endswith("/stubs")]),
        "archs": archs,
    }
    profile = os.path.join(os.path.dirname(binary), "nvcc.profile")
    return answer, [path, binary, assembler, profile, *includes, *libs] if here else []


def _existing(*paths: str) -> list[str]:
    seen: dict[str, None] = {}
    for path in paths:
        if os.path.isdir(path):
            seen.setdefault(os.path.realpath(path))
    return list(seen)


def _words(variable: str, value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(f"{variable}={value!r}: {error}; quote its words as in a shell.") from None


def _absolute(program: str) -> str:
    """The path of a program as it is from every directory, since compilers run in one of theirs."""
    return str(Path(program).absolute())


def find_launcher() -> tuple[str, ...]:
    """The command of ``JITQUANT_NVCC_LAUNCHER``, such as sccache or ccache; or ``()``."""
    given = os.environ.get(LAUNCHER, "")
    words = _words(LAUNCHER, given)
    if not words:
        return ()
    program = shutil.which(words[0])
    if program is None:
        raise ValueError(f"{LAUNCHER}={given!r}: {words[0]!r} is not a program on PATH.")
    return (_absolute(program), *words[1:])


def find_host_compiler(memo: Memo, env: Mapping[str, str] = os.environ) -> HostCompiler:
    """``CXX`` if set, else ``g++`` (nvcc's default), else ``c++``."""
    chosen = env.get("CXX", "").strip()
    for text in [chosen] if chosen else ["g++", "c++"]:
        try:
            command = _words("CXX", text)
        except ValueError as error:
            raise HostCompilerNotFoundError(f"no C++ compiler: {error}") from None
        program = shutil.which(command[0], path=env.get("PATH"))
        if program is None:
            continue
        full = (_absolute(program), *command[1:])
        answer = memo.answer(f"host 6 {shlex.join(full)}", partial(_probe_host, full))
        if "failed" not in answer:
            return HostCompiler(full, answer["version"], tuple(answer["scripts"]))
        raise HostCompilerNotFoundError(
            f"the C++ compiler {shlex.join(full)} does not work: {answer['failed']}\n"
            "Set CXX to a working one (g++ or clang++)."
        )
    given = (
        f"CXX={chosen!r} is not a program on PATH" if chosen else "neither g++ nor c++ is on PATH"
    )
    raise HostCompilerNotFoundError(
        f"no C++ compiler: {given}. Install one (Debian/Ubuntu: `apt install g++`; conda: "
        "`conda install gxx`) or set CXX."
    )


def _probe_host(command: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    output = _ask([*command, "-v", "-E", "-x", "c++", os.devnull])
    version = re.search(r"^(.*\bversion \d+\.\d.*)$", output, re.MULTILINE)
    target = re.search(r"^Target: (.*)$", output, re.MULTILINE)
    if version is None:
        return {"failed": output.strip()[-300:] or "it does not run"}, []
    words = [shutil.which(word) for word in command[:2] if not word.startswith("-")]
    programs = [program for program in words if program]
    answer = {
        "version": f"{version.group(1).strip()} {target.group(1) if target else ''}".strip(),
        "scripts": [digest for digest in map(script_in, programs) if digest],
    }
    return answer, programs


def _find_cudart(directories: Iterable[str]) -> str:
    """The CUDA runtime: the static library, else the shared one, as in the PyPI wheels."""
    directories = list(directories)
    for pattern in ("libcudart_static.a", "libcudart.so.[0-9]*", "libcudart.so"):
        for directory in directories:
            found = sorted(glob.glob(os.path.join(glob.escape(directory), pattern)), key=len)
            if found:
                return found[0]
    return ""


def cudart_flags(nvcc: Nvcc) -> list[str]:
    """Linker flags for the CUDA runtime."""
    if nvcc.cudart.endswith(".a"):
        return [nvcc.cudart, "-ldl", "-lrt", "-lpthread"]
    return [nvcc.cudart, f"-Wl,-rpath,{os.path.dirname(nvcc.cudart)}"]


def cxx_runtime_flags(host: HostCompiler) -> list[str]:
    """Linker flags for the C++ runtime that torch uses, the shared one.

    A compiler that links its own runtime statically would bring a second copy into the process,
    whose streams and locales conflict with the first. With these flags in front, the compiler's
    archive has nothing to add.
    """
    if "clang" in host.version:
        return []
    said = ask([host.program, "-print-file-name=libstdc++.so.6"], os.environ)
    return list(filter(os.path.isabs, said.splitlines()))[-1:]


def preload_runtime(soname: str | None, nvcc: Nvcc | None) -> None:
    """Load a shared CUDA runtime, so that libraries linked to ``soname`` find it.

    A build may come from an environment that no longer exists, or from a bundle on a machine
    without a compiler. A static runtime is part of the library.
    """
    if not soname or ".so" not in soname:
        return
    places = [nvcc.cudart] if nvcc is not None else []
    for root in wheel_roots():
        places += sorted(glob.glob(os.path.join(glob.escape(root), "*", "lib", soname)))
    for place in [*places, soname]:
        if os.path.basename(place) == soname:
            with contextlib.suppress(OSError):
                ctypes.CDLL(place)
                return


def find_ninja() -> tuple[str | None, str]:
    """The ninja that torch links with, and its origin; ``(None, "")`` without one."""
    if path := shutil.which("ninja"):
        return path, "on PATH"
    with contextlib.suppress(ImportError):
        import ninja

        return os.path.join(ninja.BIN_DIR, "ninja"), "the PyPI package"
    beside = os.path.join(sys.prefix, "bin", "ninja")
    return (beside, "beside Python") if os.access(beside, os.X_OK) else (None, "")
