"""Resolves a request: files, flags, compilers, and the level-1 key."""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UnsupportedArchError
from ..machine.archs import ArchChoice
from ..machine.memo import Memo, Signature
from ..machine.toolchain import (
    LAUNCHER,
    HostCompiler,
    Nvcc,
    find_host_compiler,
    find_launcher,
    find_nvcc,
    script_in,
    wheel_roots,
)
from ..machine.torch_install import TorchInstall, torch_install
from ..settings import setting
from .includes import look_at
from .key import SCHEMA, digest_of
from .named import Named, named_by
from .sources import (
    CXX_SUFFIXES,
    PROJECT,
    Roots,
    Signatures,
    Source,
    absolute,
    as_items,
    as_strings,
    check_name,
    exports_something,
    is_cuda,
    resolve_sources,
)

if TYPE_CHECKING:
    from .exports import Binding

_CHANGE_COMPILERS = (
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "SOURCE_DATE_EPOCH",
    "LD_RUN_PATH",
)
#: What nvcc puts into its commands, by nvcc.profile too.
_FLAGS_OF_NVCC = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "INCLUDES", "SYSTEM_INCLUDES")
_CHANGE_NVCC = (
    *_FLAGS_OF_NVCC,
    *("NVCC_CCBIN", "CUDAFE_FLAGS", "NVVM_FLAGS", "OCG_FLAGS", "PTXAS_FLAGS"),
)
#: Variables that change what a compiler does without showing in its command line.
_COMPILER_VARIABLES = (*_CHANGE_NVCC, *_CHANGE_COMPILERS)
#: Variables that a build depends on, those that choose the compilers included.
OF_COMPILERS = ("PATH", "CXX", LAUNCHER, "JITQUANT_DEBUG", *_CHANGE_COMPILERS)
OF_NVCC = ("CUDA_HOME", "CUDA_PATH", *_CHANGE_NVCC)
#: Flags that mean something else on each machine, and the lines of /proc/cpuinfo that tell what.
_NATIVE = re.compile(r"-m(?:arch|tune|cpu)=native")
_OF_CPU = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
_RELOCATABLE = ("-rdc", "--relocatable-device-code")
_SEPARATE = {
    *("-dc", "--device-c", "-dw", "--device-w"),
    *(f"{flag}=true" for flag in _RELOCATABLE),
}
#: A flag that adds a directory to be searched, and the directory, as words in one string.
_DIRECTORY_FLAG = re.compile(
    r"\0\s*(?:-I|--include-path|-isystem|--system-include|-iquote|-idirafter|-L)[=\s\0]*([^\0]+)"
)
#: Flags with which a compiler writes no object, or elsewhere, or not the lists that the loader
#: reads, also where nvcc hands them to its host compiler; the same of the linker; and flags for
#: other programs. Compiled where they are used, not by each import.
_NO_OBJECT = (
    r"\0(?:(?:-Xcompiler|--compiler-options)[=\0](?:[^\0]*,)?|-Wp,)?(-M[^\0,]*|-[EShV]|-###"
    r"|-o(?!(?:dir|ptf|bjtemp|pt-info)[=\0])[^\0,]*|--output(?:-file)?(?:=[^\0,]*)?"
    r"|--(?:assemble|preprocess|target-help|analyze|ltoir|clean-targets|device-link|list-gpu-\w+"
    r"|[a-z-]*dependenc[a-z-]*)|--?(?:version|help(?:=[^\0,]*)?|emit-llvm|ptx"
    r"|f?(?:device-)?syntax-only|dump(?:(?:full)?version|machine|specs)|print-[^\0,]*|cubin|fatbin"
    r"|cuda|optix-ir|dlink|run|dryrun|clean|code-ls|arch-ls))(?=[\0,])"
)
_NO_LIBRARY = (
    r"\0(?:-Wl,|-Xlinker[=\0])(?:[^\0]*,)?"
    r"(-o[^\0,]*|--ou[tpu]*(?:=[^\0,]*)?|--?(?:version|help))(?=[\0,])"
)
_OF_OTHERS = r"\0(?:-X(?!compiler|preprocessor|clang)[a-z]+|--(?!compiler)[a-z]+-options)\0[^\0]*"
_ARCH_FLAGS = ("-arch", "--gpu-architecture", "-gencode", "--generate-code", "-code", "--gpu-code")


class Request(NamedTuple):
    """The arguments of one ``get_cuda_module`` call, with paths as they were given."""

    name: str
    sources: tuple[object, ...]
    include_dirs: tuple[str, ...] = ()
    cuda_flags: tuple[str, ...] = ()
    cxx_flags: tuple[str, ...] = ()
    archs: str | tuple[str, ...] | None = None


def checked_request(
    name: object,
    sources: object,
    include_dirs: object,
    cuda_flags: object,
    cxx_flags: object,
    archs: object,
) -> Request:
    """The request with these arguments.

    Raises:
        TypeError, ValueError: one of them is invalid.
    """
    return Request(
        check_name(name),
        as_items(sources, "sources", "'kernel.cu'", (str, os.PathLike, Source)),
        as_strings(include_dirs, "include_dirs", "'include'"),
        as_strings(cuda_flags, "cuda_flags", "'-lineinfo'"),
        as_strings(cxx_flags, "cxx_flags", "'-O3'"),
        archs if archs is None or isinstance(archs, str) else as_strings(archs, "archs", "'9.0'"),
    )


@dataclass(frozen=True, eq=False)
class Wanted:
    """A request with resolved files, but without compilers.

    ``inputs`` is the readable form of what its build depends on; ``roots`` name its headers.
    """

    request: Request
    sources: tuple[str, ...]
    include_dirs: tuple[str, ...]
    archs: ArchChoice
    roots: Roots
    inputs: dict[str, Any]
    watch: Signatures

    @property
    def name(self) -> str:
        """The module's name."""
        return self.request.name

    @property
    def debug(self) -> bool:
        """Whether it is built for a debugger."""
        return "debug" in self.inputs

    @property
    def has_cuda(self) -> bool:
        """Whether a source is compiled by nvcc."""
        return any(map(is_cuda, self.sources))


@dataclass(frozen=True, eq=False)
class Plan(Wanted):
    """A request with files and compilers; ``inputs`` contains both, and hashes to ``level1``.

    ``bindings`` are to be generated, for the sources that export launchers.
    """

    nvcc: Nvcc | None
    host: HostCompiler
    launcher: tuple[str, ...]
    level1: str
    notes: tuple[str, ...]
    bindings: tuple[Binding, ...]

    @property
    def programs(self) -> tuple[str, ...]:
        """The compilers, and what runs them."""
        nvcc = (self.nvcc.command,) if self.nvcc else ()
        found = map(shutil.which, (*nvcc, *self.host.command[:2], *self.launcher[:1]))
        return tuple(program for program in found if program)

    @property
    def program_places(self) -> tuple[str, ...]:
        """The directories where these were looked for, as one that is found first may come."""
        nvcc = map(os.path.dirname, self.nvcc.looked_at if self.nvcc else ())
        return (*nvcc, *os.environ.get("PATH", "").split(os.pathsep))


def check_flags(cuda_flags: tuple[str, ...], words: Iterable[str]) -> None:
    """Reject flags that conflict with the loader's own: nvcc's, and those among all ``words``."""
    text = "\0".join(["", *words, ""])
    if found := re.search(_NO_OBJECT, re.sub(_OF_OTHERS, "", text)) or re.search(_NO_LIBRARY, text):
        raise ValueError(
            "cuda_flags, cxx_flags: expected flags with which a compiler writes an object, and the "
            f"loader's list of what it reads; got {found[1]!r}. Leave it out, also in files of "
            "flags and in variables such as NVCC_APPEND_FLAGS; `jitquant ptx` and `sass` show "
            "code, and `jitquant compile-commands` writes commands to run with it by hand."
        )
    for flag, value in zip_longest(cuda_flags, cuda_flags[1:], fillvalue=""):
        if flag.split("=", 1)[0] in _ARCH_FLAGS:
            raise ValueError(
                f"cuda_flags: {flag!r} selects an architecture; give archs=[...] instead "
                "(for example archs=['9.0a'])."
            )
        given = f"{flag} {value}" if flag in _RELOCATABLE else flag
        if given.replace(" ", "=") in _SEPARATE:
            raise ValueError(
                f"cuda_flags: {given!r} asks for separate device compilation, which is not "
                "supported: each .cu is compiled whole. Put the device functions that two files "
                "share in a header."
            )


def check_paths(sources: tuple[str, ...], include_dirs: tuple[str, ...]) -> None:
    """Reject paths that a compiler would misread.

    nvcc passes paths on through a shell, in double quotes. It takes directories apart at commas,
    and does without those with a single quote.
    """
    has_cuda = any(map(is_cuda, sources))
    refused = '\\\n"$`' if has_cuda else "\\\n"
    for argument, paths, more in (("sources", sources, ""), ("include_dirs", include_dirs, "',")):
        for path in paths:
            found = sorted(set(path) & set(refused + more * has_cuda))
            if found:
                raise ValueError(
                    f"{argument}: {path!r} has {found[0]!r} in it, which "
                    f"{'nvcc' if has_cuda else 'the compiler'} does not take literally. Rename "
                    "that directory or file; spaces and letters of any script are fine."
                )


def wheel_include_dirs() -> tuple[str, ...]:
    """Headers of the CUDA libraries that a CUDA build of torch installs from PyPI.

    torch's own headers include cublas, cusparse and cusolver, which a minimal toolkit lacks.
    """
    return tuple(
        directory
        for root in wheel_roots()
        for directory in sorted(glob.glob(os.path.join(glob.escape(root), "*", "include")))
    )


def python_include_dir() -> str:
    """Where Python.h is."""
    import sysconfig

    return sysconfig.get_path("include", scheme="posix_prefix") or ""


def python_abi() -> str:
    """The ABI that an extension module with Python's own API is bound to."""
    # Not from sysconfig, which shows other threads half of its variables while it reads them.
    return EXTENSION_SUFFIXES[0].removeprefix(".").removesuffix(".so")


def _labels_of(
    sources: tuple[str, ...],
    include_dirs: tuple[str, ...],
    flag_dirs: tuple[str, ...],
    kernels_dir: str,
) -> dict[str, str]:
    """The caller's and the project's directories that headers are named after."""
    labels: dict[str, str] = {}
    for path in sources:
        directory = os.path.dirname(path)
        if directory not in labels.values():
            labels[f"src{len(labels)}"] = directory
    labels |= {f"inc{index}": directory for index, directory in enumerate(include_dirs)}
    labels |= {f"flag{index}": directory for index, directory in enumerate(flag_dirs)}
    return {**labels, PROJECT: kernels_dir}


def all_flags(request: Request, env: Mapping[str, str]) -> list[str]:
    """The flags of a request, and those that nvcc takes from variables."""
    flags = [*request.cuda_flags, *request.cxx_flags]
    for variable in _FLAGS_OF_NVCC:
        with contextlib.suppress(ValueError):  # nvcc will say what is wrong with it
            flags += shlex.split(env.get(variable, ""))
    return flags


def directories_in(words: Iterable[str]) -> list[str]:
    """The search directories that the words of flags add, as they are written."""
    return _DIRECTORY_FLAG.findall("\0".join(["", *words]))


def _flag_dirs(named: Named, env: Mapping[str, str]) -> tuple[str, ...]:
    """The search directories that flags and variables add, and those of files they name."""
    found = directories_in(word for flag in named.words for word in flag.split(","))
    found += map(os.path.dirname, named.files)
    for variable in ("CPATH", "CPLUS_INCLUDE_PATH"):
        found += env.get(variable, "").split(os.pathsep)
    return tuple(dict.fromkeys(directory for directory in found if os.path.isabs(directory)))


def _installations(torch: TorchInstall, nvcc: Nvcc | None) -> dict[str, str]:
    """The directories of installations that headers are named after."""
    found = {
        "=torch": torch.directory,
        "=python": python_include_dir(),
        "=cuda": os.path.dirname(os.path.dirname(nvcc.path)) if nvcc else "",
    }
    found |= {f"=nvidia{index}": root for index, root in enumerate(wheel_roots())}
    return {label: directory for label, directory in found.items() if directory}


def look_up(
    request: Request,
    *,
    kernels_dir: Path,
    memo: Memo,
    choose: Callable[[str | Sequence[str] | None], ArchChoice],
) -> Wanted:
    """The files and architectures of ``request``; neither needs nor looks for a compiler."""
    torch = torch_install()
    named = named_by(all_flags(request, os.environ))
    check_flags(request.cuda_flags, (*named.words, *os.environ.get("CXX", "").split()))
    sources = resolve_sources(request.sources, kernels_dir)
    library_dir = str(kernels_dir / "include")
    include_dirs = tuple(absolute(d, "include_dirs") for d in request.include_dirs)
    for given, directory in zip(request.include_dirs, include_dirs, strict=True):
        if not os.path.isdir(directory):
            raise FileNotFoundError(
                f"include_dirs: {given!r} is not a directory (looked at {directory})."
            )
    check_paths(sources, (*include_dirs, library_dir))
    has_cuda = any(map(is_cuda, sources))
    archs = choose(request.archs) if has_cuda else ArchChoice((), "no CUDA source")
    contents: list[list[str]] = []
    watch: list[tuple[str, Signature | None]] = []
    for path in sources:
        state = memo.state(path, own=True)
        if state is None:
            raise FileNotFoundError(f"sources: {path} disappeared while it was being read.")
        contents.append([os.path.basename(path), state.digest])
        watch.append((path, state.signature))
    told: dict[str, Signature | None] = {}
    if not any(path.endswith(CXX_SUFFIXES) for path in sources):
        for directory in {*map(os.path.dirname, sources), str(kernels_dir)}:
            look_at(os.path.join(directory, "bindings"), told)  # a binding may come
    watch += told.items()
    generates = any(map(exports_something, sources))
    bindings_dir = str(kernels_dir / "bindings") if generates else None
    inputs: dict[str, Any] = {
        "schema": SCHEMA,
        "name": request.name,
        "sources": contents,
        "cuda_flags": list(request.cuda_flags),
        "cxx_flags": list(request.cxx_flags),
        "archs": list(archs.archs),
        "libc": "-".join(platform.libc_ver()),
        "machine": platform.machine(),
        "torch": torch.identity,
    }
    if generates:
        # The binding's text follows from the sources and the generator.
        from .exports import generator_file

        generator = memo.state(generator_file())
        inputs["binding_generator"] = generator.digest if generator else None
    if setting("JITQUANT_DEBUG") == "1":
        inputs["debug"] = True
    own = tuple(d for d in include_dirs if d != library_dir)
    if any(map(_NATIVE.search, (*named.words, os.environ.get("CXX", "")))):
        inputs["cpu"] = _this_cpu()
    roots = Roots(_labels_of(sources, own, _flag_dirs(named, os.environ), str(kernels_dir)))
    inputs["include_dirs"] = [roots.place(d) for d in include_dirs]
    inputs["layout"] = roots.layout()
    # A compiler stops at a directory that it may not read, whether or not a source needs it.
    ours = [d for d in (library_dir, bindings_dir) if d and os.access(d, os.X_OK)]
    return Wanted(
        request=request,
        sources=sources,
        include_dirs=(*include_dirs, *ours),
        archs=archs,
        roots=roots,
        inputs=inputs,
        watch=tuple(watch),
    )


def _this_cpu() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as stream:
        first = stream.read().partition("\n\n")[0].splitlines()
        return digest_of([line for line in first if line.startswith(_OF_CPU)])[:16]
    return platform.node()


def make_plan(wanted: Wanted, memo: Memo) -> Plan:
    """Find the compilers for a request. Compiles nothing."""
    host = find_host_compiler(memo)
    nvcc, notes = find_nvcc(memo) if wanted.has_cuda else (None, ())
    launcher = find_launcher()
    if nvcc is not None:
        check_known(wanted.archs, nvcc)
    roots = Roots({**wanted.roots.labels, **_installations(torch_install(), nvcc)})
    inputs = {
        **wanted.inputs,
        "installed": [line for line in roots.layout() if line not in wanted.inputs["layout"]],
        "nvcc": _described(nvcc) if nvcc else None,
        "cudart": nvcc.cudart_name if nvcc else None,
        "host_compiler": [host.version, list(host.command[1:]), *host.scripts],
        "environment": {k: os.environ[k] for k in _COMPILER_VARIABLES if os.environ.get(k)},
    }
    if launcher:
        inputs["launcher"] = [os.path.basename(launcher[0]), *launcher[1:], script_in(launcher[0])]
    return Plan(
        **{**vars(wanted), "roots": roots, "inputs": inputs},
        nvcc=nvcc,
        host=host,
        launcher=launcher,
        level1=digest_of(inputs),
        notes=notes,
        bindings=_bindings_of(wanted),
    )


def _bindings_of(wanted: Wanted) -> tuple[Binding, ...]:
    if "binding_generator" not in wanted.inputs:
        return ()
    from .exports import find_binding

    found = (find_binding(wanted.name, path) for path in wanted.sources)
    return tuple(binding for binding in found if binding is not None)


def _described(nvcc: Nvcc) -> str:
    """The version, and a wrapper's digest, because it may add flags."""
    wrapper = f" through a wrapper {nvcc.wrapper[:12]}" if nvcc.wrapper else ""
    return f"{nvcc.version}{wrapper}"


def check_known(archs: ArchChoice, nvcc: Nvcc) -> None:
    """Raise `UnsupportedArchError` for an architecture that ``nvcc`` does not know."""
    for arch in archs.archs:
        number = int(arch.partition("+")[0].rstrip("af"))
        if nvcc.archs and number not in nvcc.archs:
            known = ", ".join(f"{n // 10}.{n % 10}" for n in nvcc.archs if n >= 80)
            raise UnsupportedArchError(
                f"architecture {arch!r} (from {archs.origin}) is not known to nvcc "
                f"{nvcc.version} ({nvcc.path}). Accepted with it: {known}. A newer CUDA toolkit "
                "may know more; set CUDA_HOME to it."
            )
