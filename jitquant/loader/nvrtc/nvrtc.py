"""NVRTC, NVIDIA's compiler as a library: from device code to a cubin without a host compiler.

The library comes with a CUDA build of torch, with a toolkit, or with the extra ``nvrtc``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import LoaderError, NvrtcNotFoundError, extra

#: Headers of the C++ library for NVRTC, which has none.
INCLUDE_DIR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvrtc_include")
_COMPILATION_FAILED = 6


class NvrtcFailure(Exception):  # noqa: N818
    """The source does not compile; the text is what NVRTC said, ``code`` its result."""

    def __init__(self, log: str, code: int) -> None:
        super().__init__(log)
        self.log = log
        self.code = code


@dataclass(frozen=True)
class Compiled:
    """What came out: the cubin, the PTX that it was made of, symbols of the names, warnings."""

    cubin: bytes
    ptx: str
    symbols: dict[str, str]
    log: str


class Nvrtc:
    """The library, loaded.

    Attributes:
        version: ``major.minor``, with the version of the PyPI package or the file where known.
        include_dirs: the CUDA headers that go with it, those of the C++ library for it first.
    """

    def __init__(self) -> None:
        try:
            from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

            loaded = load_nvidia_dynamic_lib("nvrtc")
        except (ImportError, DynamicLibNotFoundError) as error:
            raise NvrtcNotFoundError(
                "backend='nvrtc' needs the library libnvrtc, which was not found "
                f"({str(error).splitlines()[0]}). Install {extra('nvrtc')}."
            ) from error
        self._library: Any = ctypes.CDLL(loaded.abs_path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        found = re.search(r"\.so\.(\d+\.\d+\.\d+)$", os.path.realpath(str(loaded.abs_path)))
        self.version = f"{major.value}.{minor.value}" + (
            f" ({found.group(1)})" if found else _package_version()
        )
        self.include_dirs = (INCLUDE_DIR, *_cuda_include_dirs())

    def compile(
        self, text: str, name: str, options: Sequence[str], expressions: Sequence[str]
    ) -> Compiled:
        """Compile ``text``, which messages call ``name``; ``expressions`` name kernels.

        Raises:
            NvrtcFailure: it does not compile.
        """
        library, program = self._library, ctypes.c_void_p()
        self._check(
            library.nvrtcCreateProgram(
                ctypes.byref(program), text.encode(), os.fsencode(name), 0, None, None
            )
        )
        try:
            for expression in expressions:
                self._check(library.nvrtcAddNameExpression(program, expression.encode()))
            given = [os.fsencode(option) for option in options]
            code = library.nvrtcCompileProgram(
                program, len(given), (ctypes.c_char_p * len(given))(*given)
            )
            log = self._text(program, "ProgramLog").decode(errors="replace")
            if code != 0:
                said = log if code == _COMPILATION_FAILED else self._say(code, log)
                raise NvrtcFailure(said, code)
            symbols: dict[str, str] = {}
            for expression in expressions:
                symbol = ctypes.c_char_p()
                self._check(
                    library.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(symbol))
                )
                symbols[expression] = (symbol.value or b"").decode()
            ptx = self._text(program, "PTX").decode(errors="replace")
            return Compiled(self._text(program, "CUBIN", whole=True), ptx, symbols, log)
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str, *, whole: bool = False) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw if whole else buffer.value

    def _say(self, code: int, log: str = "") -> str:
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        said = self._library.nvrtcGetErrorString(code).decode()
        return f"{said}\n{log}".strip()

    def _check(self, code: int) -> None:
        if code != 0:
            raise LoaderError(f"NVRTC: {self._say(code)}")


def _package_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(PackageNotFoundError):
            return f" ({version(name)})"
    return ""


def _cuda_include_dirs() -> tuple[str, ...]:
    from cuda.pathfinder import find_nvidia_header_directory

    found: dict[str, None] = {}
    for family in ("cudart", "cccl"):
        directory = find_nvidia_header_directory(family)
        if directory:
            found.setdefault(str(directory))
            inside = os.path.join(str(directory), "cccl")
            if os.path.isdir(inside):
                found.setdefault(inside)
    return tuple(found)


def cuda_header_version(directories: Sequence[str]) -> str | None:
    """What the CUDA headers say their version is."""
    for directory in directories:
        path = os.path.join(directory, "cuda_runtime_api.h")
        if directory != INCLUDE_DIR and os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as stream:
                found = re.search(r"#define CUDART_VERSION\s+(\d+)", stream.read())
            return found.group(1) if found else None
    return None
