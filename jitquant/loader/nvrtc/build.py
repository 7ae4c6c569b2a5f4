"""``backend="nvrtc"``: from a request to kernels, compiled from the current files."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ..module import no_attribute
from ..request.key import digest_of
from ..request.plan import Request, Wanted, directories_in
from ..request.scan import may_be_read
from ..request.sources import is_cuda
from .compiler import Program, compile_kernels
from .kernel import DeviceKernel

Compiled = tuple[Program, dict[str, DeviceKernel]]


class DeviceModule:
    """The kernels of one source, compiled by NVRTC.

    A kernel that is not a template is an attribute, named without namespaces. :meth:`kernel`
    returns any kernel, also of a header.

    Attributes:
        name: the module's name.
        arch: the architecture.
        key: a hash of the sources, headers and options that it was compiled from.
    """

    def __init__(self, compile_some: Callable[..., Compiled]) -> None:
        program, self._kernels = compile_some()
        self.name, self.arch, self.key = program.name, program.arch, program.key
        self._compile_some = compile_some
        self._plain = {name.rpartition("::")[2]: kernel for name, kernel in self._kernels.items()}

    def kernel(self, expression: str) -> DeviceKernel:
        """A kernel by a C++ name expression, such as ``"scale<__nv_bfloat16, 4>"``.

        An instance of a template is compiled on first use.

        Raises:
            CompileError: there is no such kernel, or it does not compile.
        """
        if expression not in self._kernels:
            self._kernels[expression] = self._compile_some(expression)[1][expression]
        return self._kernels[expression]

    def __getattr__(self, attribute: str) -> DeviceKernel:
        plain: dict[str, DeviceKernel] = self.__dict__.get("_plain", {})
        if attribute in plain:
            return plain[attribute]
        raise no_attribute(f"module {self.__dict__.get('name')!r}", attribute, plain)

    def __dir__(self) -> list[str]:
        return [*self._plain, "arch", "kernel", "key", "name"]

    def __repr__(self) -> str:
        names = ", ".join(self._plain) or "templates alone"
        return f"<DeviceModule {self.name!r} (sm_{self.arch}) key {self.key[:12]}: {names}>"


@dataclass
class DeviceLoader:
    """Compiles and keeps the modules of ``backend="nvrtc"`` for one loader.

    NVRTC takes a fraction of a second, so nothing is stored on disk.

    Attributes:
        look_up: the files and architectures of a request.
        reloads: whether edits of these files are detected.
        check_may_compile: raises if nothing may be compiled now.
    """

    look_up: Callable[[Request], Wanted]
    reloads: Callable[[Wanted], bool]
    check_may_compile: Callable[[Wanted], None]
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _latest: dict[Request, DeviceModule] = field(default_factory=dict)

    def get(self, request: Request, *, frozen: bool) -> DeviceModule:
        """The module of ``request``, compiled from its current files."""
        with self._guard:
            module = self._latest.get(request)
            if module is not None and frozen:
                return module
            wanted = self.look_up(request)
            if module is None or (
                self.reloads(wanted) and module.key != _program(request, wanted).key
            ):
                module = self._latest[request] = DeviceModule(partial(self._compile, request))
            return module

    def _compile(self, request: Request, *expressions: str) -> Compiled:
        while True:
            wanted = self.look_up(request)
            self.check_may_compile(wanted)
            program = _program(request, wanted)
            kernels = compile_kernels(program, expressions)
            # NVRTC reads the headers itself, and one may have changed meanwhile.
            if _program(request, self.look_up(request)) == program:
                return program, kernels


def _program(request: Request, wanted: Wanted) -> Program:
    """What to compile.

    Raises:
        ValueError: not one ``.cu`` for one architecture, or a macro or a flag names a file to
            include, which only a compiler can follow; NVRTC does not list what it reads.
    """
    kernels = list(filter(is_cuda, wanted.sources))
    archs, flags = wanted.archs.archs, request.cuda_flags
    if len(kernels) != 1 or len(archs) != 1:
        raise ValueError(
            "backend='nvrtc' compiles one .cu for one architecture, such as archs='90a', not "
            f"{len(kernels)} for {', '.join(archs)} (from {wanted.archs.origin})."
        )
    source, arch = kernels[0], archs[0].partition("+")[0]
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
    return Program(request.name, source, texts[source], arch, options, key)
