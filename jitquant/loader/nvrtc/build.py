"""``backend="nvrtc"``: from a request to kernels, compiled from the current files."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import NamedTuple

from ..request.key import digest_of
from ..request.plan import Request, Wanted, directories_in
from ..request.scan import may_be_read
from ..request.sources import is_cuda
from ..store.match import MOST_ATTEMPTS, changes_too_fast
from .compiler import Cubin, compile_cubin
from .device_module import DeviceModule

_FILE_FLAGS = ("--pre-include", "-include", "--use-pch")


class DeviceLoader:
    """Compiles and keeps the modules of ``backend="nvrtc"`` for one loader.

    NVRTC takes a fraction of a second, so nothing is stored on disk.

    Args:
        look_up: the files and architectures of a request.
        reloads: whether edits of these files are detected.
        check_may_compile: raises if nothing may be compiled now.
    """

    def __init__(
        self,
        look_up: Callable[[Request], Wanted],
        reloads: Callable[[Wanted], bool],
        check_may_compile: Callable[[Wanted], None],
    ) -> None:
        self._look_up = look_up
        self._reloads = reloads
        self._check_may_compile = check_may_compile
        self._guard = threading.RLock()
        self._modules: dict[str, DeviceModule] = {}
        self._latest: dict[Request, tuple[DeviceModule, bool]] = {}

    def get(self, request: Request, *, frozen: bool) -> DeviceModule:
        """The module of ``request``, compiled from its current files."""
        with self._guard:
            latest, reloads = self._latest.get(request, (None, True))
            if latest is not None and (frozen or not reloads):
                return latest
            wanted = self._look_up(request)
            unit = _unit(request, wanted)
            if unit.key not in self._modules:
                unit, cubin = self._compile(request)
                self._modules[unit.key] = DeviceModule(
                    request.name, unit.arch, unit.key, cubin, lambda n: self._compile(request, n)[1]
                )
            module = self._modules[unit.key]
            self._latest[request] = module, self._reloads(wanted)
            return module

    def _compile(self, request: Request, *expressions: str) -> tuple[_Unit, Cubin]:
        with self._guard:
            for _ in range(MOST_ATTEMPTS):
                wanted = self._look_up(request)
                self._check_may_compile(wanted)
                unit = _unit(request, wanted)
                cubin = compile_cubin(
                    request.name, unit.source, unit.text, unit.options, expressions
                )
                if _unit(request, self._look_up(request)).key == unit.key:
                    return unit, cubin
        raise changes_too_fast(request.name)


class _Unit(NamedTuple):
    """A source and NVRTC's options, with the key of everything that it can include."""

    source: str
    text: bytes
    arch: str
    options: tuple[str, ...]
    key: str


def _unit(request: Request, wanted: Wanted) -> _Unit:
    """What to compile.

    Raises:
        ValueError: not one ``.cu``, several architectures, or a macro or a flag names a file to
            include, which only a compiler can follow; NVRTC does not list what it reads.
    """
    kernels = list(filter(is_cuda, wanted.sources))
    if len(kernels) != 1:
        raise ValueError(
            f"sources: backend='nvrtc' compiles one .cu, and {len(kernels)} were named."
        )
    archs = wanted.archs.archs
    if len(archs) != 1:
        raise ValueError(
            f"archs: backend='nvrtc' compiles for one architecture, and {', '.join(archs)} "
            f"(from {wanted.archs.origin}) are {len(archs)}; give one, such as archs='90a'."
        )
    source, arch, flags = kernels[0], archs[0].partition("+")[0], request.cuda_flags
    for flag in flags:
        if flag.strip().startswith(_FILE_FLAGS):
            raise ValueError(
                f"cuda_flags: backend='nvrtc' does not see edits of the file that {flag!r} adds; "
                f"write #include into {source}."
            )
    options = (
        f"--gpu-architecture=sm_{arch}",
        "-default-device",
        "-G" if wanted.debug else "-lineinfo",
        *([] if any("-std" in flag for flag in flags) else ["-std=c++17"]),
        *(f"-I{directory}" for directory in wanted.include_dirs),
        *flags,
    )
    texts = may_be_read(source, [*wanted.include_dirs, *directories_in(flags)], flags)
    digests = {path: hashlib.sha256(text).hexdigest() for path, text in texts.items()}
    key = digest_of([request.name, options, digests])
    return _Unit(source, texts[source], arch, options, key)
