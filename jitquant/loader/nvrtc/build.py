"""``backend="nvrtc"``: from a request to kernels, compiled from the current files."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..diagnostics import compile_error
from ..errors import CaptureError, FrozenError, LoaderError
from ..request.key import digest_of
from ..request.plan import Request, Wanted
from ..request.sources import CUDA_SUFFIXES, scan_includes
from .compiler import NvrtcFailure, compile_cubin, plain_name
from .device_module import Cubin, DeviceModule, Kernel

_COMPUTED = re.compile(rb"^[ \t]*#[ \t]*include[ \t]+[A-Za-z_]", re.MULTILINE)
_MOST_ATTEMPTS = 5
_HINT = (
    "NVRTC compiles device code alone: put launchers, and the headers that only they need, in "
    "#ifndef __CUDACC_RTC__ ... #endif."
)


class DeviceLoader:
    """Compiles and caches the modules of ``backend="nvrtc"`` for one loader.

    NVRTC takes a fraction of a second, so nothing is stored on disk.

    Args:
        look_up: the files and architectures of a request.
        reloads: whether edits of these files are detected.
        check_may_build: raises if nothing may be compiled.
    """

    def __init__(
        self,
        look_up: Callable[[Request], Wanted],
        reloads: Callable[[Wanted], bool],
        check_may_build: Callable[[Wanted], None],
    ) -> None:
        self._look_up = look_up
        self._reloads = reloads
        self._check_may_build = check_may_build
        self._guard = threading.RLock()
        self._modules: dict[str, DeviceModule] = {}
        self._latest: dict[Request, tuple[DeviceModule, bool]] = {}

    def get(self, request: Request, *, frozen: bool, capturing: bool) -> DeviceModule:
        """The module of ``request``, compiled from its current files.

        Raises:
            ValueError: not one ``.cu``, or several architectures.
            NvrtcNotFoundError, CompileError, FrozenError, CaptureError: as their names say.
        """
        with self._guard:
            latest, reloads = self._latest.get(request, (None, True))
            if latest is not None and (frozen or not reloads):
                return latest
            if frozen or capturing:
                raise (FrozenError if frozen else CaptureError)(
                    f"module {request.name!r} is not loaded for backend='nvrtc', and "
                    f"{'jitquant.freeze() was called' if frozen else 'a graph is being captured'}."
                )
            unit = self._unit(request)
            module = self._modules.get(unit.key)
            if module is None:
                unit, cubin = self._compile(request, ())
                module = DeviceModule(
                    request.name,
                    unit.arch,
                    unit.key,
                    cubin,
                    lambda expression: self._compile(request, (expression,))[1],
                )
                self._modules[unit.key] = module
            self._latest[request] = module, self._reloads(unit.wanted)
            return module

    def _compile(self, request: Request, expressions: Sequence[str]) -> tuple[_Unit, Cubin]:
        with self._guard:
            unit = self._unit(request)
            self._check_may_build(unit.wanted)
            for _ in range(_MOST_ATTEMPTS):
                cubin = _compile(unit, expressions)
                before, unit = unit, self._unit(request)
                if unit.key == before.key:
                    return unit, cubin
        raise LoaderError(f"module {request.name!r}: its sources change faster than they compile.")

    def _unit(self, request: Request) -> _Unit:
        wanted = self._look_up(request)
        kernels = [path for path in wanted.sources if path.lower().endswith(CUDA_SUFFIXES)]
        if len(kernels) != 1:
            raise ValueError(
                f"sources: backend='nvrtc' compiles one .cu, and {len(kernels)} were named."
            )
        if len(wanted.archs.archs) != 1:
            raise ValueError(
                f"archs: backend='nvrtc' compiles for one architecture, and "
                f"{', '.join(wanted.archs.archs)} (from {wanted.archs.origin}) are "
                f"{len(wanted.archs.archs)}; give one, such as archs='90a'."
            )
        flags = request.cuda_flags
        options = (
            f"--gpu-architecture=sm_{wanted.archs.archs[0].partition('+')[0]}",
            "-default-device",
            "-G" if wanted.debug else "-lineinfo",
            *([] if any("-std" in flag for flag in flags) else ["-std=c++17"]),
            *(f"-I{directory}" for directory in wanted.include_dirs),
            *flags,
        )
        text = Path(kernels[0]).read_bytes()
        key = digest_of([request.name, options, _read_by(kernels[0], options)])
        return _Unit(wanted, kernels[0], text, options, key)


class _Unit(NamedTuple):
    """A source, with the key of everything that it can include."""

    wanted: Wanted
    source: str
    text: bytes
    options: tuple[str, ...]
    key: str

    @property
    def arch(self) -> str:
        return self.options[0].partition("sm_")[2]


def _compile(unit: _Unit, expressions: Sequence[str]) -> Cubin:
    text = unit.text.decode(errors="surrogateescape")
    try:
        compiled = compile_cubin(text, unit.source, unit.options, expressions)
    except NvrtcFailure as failure:
        error = compile_error(
            unit.wanted.name,
            label="NVRTC",
            command=["nvrtc", *unit.options, unit.source],
            returncode=failure.code,
            text=failure.log,
            root=Path(unit.source).parent,
            log_path=None,
        )
        error.args = (f"{error.args[0]}\n{_HINT}",)
        raise error from None
    named = {name: s for s in compiled.parameters if (name := plain_name(s)) is not None}
    return Cubin(
        compiled.cubin,
        {
            name: Kernel(symbol, compiled.parameters[symbol])
            for name, symbol in (named | compiled.symbols).items()
        },
    )


def _read_by(source: str, options: Sequence[str]) -> dict[str, str]:
    """The digest of each file that ``source`` could include, by path; NVRTC does not list them.

    Raises:
        ValueError: a macro names the file to include, which only a compiler can follow.
    """
    directories = [option[2:] for option in options if option.startswith("-I")]
    found: dict[str, str] = {}
    for path in scan_includes(source, directories).files:
        text = Path(path).read_bytes()
        if _COMPUTED.search(text):
            raise ValueError(f"backend='nvrtc': {path} includes what a macro names; name a file.")
        found[path] = hashlib.sha256(text).hexdigest()
    return found
