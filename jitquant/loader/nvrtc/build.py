"""``backend="nvrtc"``: from a request to kernels, compiled from the current files."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable

from ..request.key import digest_of
from ..request.plan import Request, Wanted
from ..request.scan import may_be_read
from ..request.sources import CUDA_SUFFIXES
from ..store.match import MOST_ATTEMPTS, changes_too_fast
from .compiler import Cubin, compile_cubin
from .device_module import DeviceModule

#: A directory in the words of flags, however NVRTC takes it: "-I", "-I=", "--include-path=", apart.
_DIRECTORY = re.compile(r"\0\s*(?:-I|--include-path(?=[=\0]))[=\s\0]*([^\0]+)")
_FILE_FLAGS = ("--pre-include", "-include", "--use-pch")


class DeviceLoader:
    """Compiles and caches the modules of ``backend="nvrtc"`` for one loader.

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
        """The module of ``request``, compiled from its current files.

        Raises:
            ValueError: not one ``.cu``, or several architectures.
            NvrtcNotFoundError, CompileError, FrozenError, CaptureError: as their names say.
        """
        with self._guard:
            latest, reloads = self._latest.get(request, (None, True))
            if latest is not None and (frozen or not reloads):
                return latest
            unit = _Unit(request, self._look_up(request))
            if unit.key not in self._modules:
                unit, cubin = self._compile(request)
                self._modules[unit.key] = DeviceModule(
                    request.name, unit.arch, unit.key, cubin, lambda n: self._compile(request, n)[1]
                )
            module = self._modules[unit.key]
            self._latest[request] = module, self._reloads(unit.wanted)
            return module

    def _compile(self, request: Request, *expressions: str) -> tuple[_Unit, Cubin]:
        with self._guard:
            unit = _Unit(request, self._look_up(request))
            self._check_may_compile(unit.wanted)
            for _ in range(MOST_ATTEMPTS):
                cubin = compile_cubin(
                    request.name, unit.source, unit.text, unit.options, expressions
                )
                before, unit = unit, _Unit(request, self._look_up(request))
                if unit.key == before.key:
                    return unit, cubin
        raise changes_too_fast(request.name)


class _Unit:
    """A source and NVRTC's options, with the key of everything that it can include.

    Raises:
        ValueError: not one ``.cu``, several architectures, or a macro or a flag names a file to
            include, which only a compiler can follow; NVRTC does not list what it reads.
    """

    def __init__(self, request: Request, wanted: Wanted) -> None:
        kernels = [path for path in wanted.sources if path.lower().endswith(CUDA_SUFFIXES)]
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
        self.wanted = wanted
        self.source = kernels[0]
        self.arch = archs[0].partition("+")[0]
        flags = request.cuda_flags
        for flag in flags:
            if flag.strip().startswith(_FILE_FLAGS):
                raise ValueError(
                    f"cuda_flags: backend='nvrtc' does not see edits of the file that {flag!r} "
                    f"adds; write #include into {self.source}."
                )
        self.options = (
            f"--gpu-architecture=sm_{self.arch}",
            "-default-device",
            "-G" if wanted.debug else "-lineinfo",
            *([] if any("-std" in flag for flag in flags) else ["-std=c++17"]),
            *(f"-I{directory}" for directory in wanted.include_dirs),
            *flags,
        )
        directories = _DIRECTORY.findall("\0".join(["", *self.options]))
        texts = may_be_read(self.source, directories, flags)
        self.text = texts[self.source]
        digests = {path: hashlib.sha256(text).hexdigest() for path, text in texts.items()}
        self.key = digest_of([request.name, self.options, digests])
