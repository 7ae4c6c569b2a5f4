"""NVRTC, through NVIDIA's own bindings: from CUDA C++ to a cubin without nvcc or a host compiler.

The library comes with a CUDA build of torch, with a toolkit, or with the extra ``nvrtc``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..diagnostics import compile_error
from ..errors import LoaderError, NvrtcNotFoundError, extra
from ..machine.symbols import demangle
from .kernel import DeviceKernel, Parameter

_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,\[]*(?:\[(\d+)\])?")
_STANDARD = """namespace cuda {{ namespace std {{}} }}
#include <cuda/std/{0}>
namespace std {{ using namespace ::cuda::std; }}
"""


class Program(NamedTuple):
    """A source with NVRTC's options; ``key`` is a hash of them and of all that it can include."""

    name: str
    source: str
    text: bytes
    arch: str
    options: tuple[str, ...]
    key: str


def compile_kernels(given: Program, expressions: Sequence[str]) -> dict[str, DeviceKernel]:
    """The kernels of a source, by qualified name, and the instances of templates asked for."""
    nvrtc = _bindings()
    roots = _toolkit_includes()
    headers = standard_headers(roots)
    names, texts = ([text.encode() for text in part] for part in zip(*headers.items(), strict=True))
    source = os.fsencode(given.source)
    program = _checked(nvrtc.nvrtcCreateProgram(given.text, source, len(names), texts, names))
    try:
        for expression in expressions:
            _checked(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        options = [*map(os.fsencode, given.options), *(f"-I{root}".encode() for root in roots)]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(code) != 0:
            log = _bytes(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0\n")
            failed = (["nvrtc", *given.options, given.source], "NVRTC")
            root = Path(given.source).parent
            raise compile_error(given.name, failed, int(code), log or code.name, root)
        found = parameters_of(_bytes(nvrtc, program, "PTX").decode(errors="replace"))
        symbols = {plain: symbol for symbol in found if (plain := plain_name(symbol)) is not None}
        for expression in expressions:
            lowered = _checked(nvrtc.nvrtcGetLoweredName(program, expression.encode()))
            symbols[expression] = lowered.decode()
        cubin = _bytes(nvrtc, program, "CUBIN")
        return {name: DeviceKernel(name, s, found[s], cubin) for name, s in symbols.items()}
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def standard_headers(roots: Sequence[str]) -> dict[str, str]:
    """The C++ library's headers, which NVRTC has not: they include CCCL's."""
    names = [file.name for root in roots for file in Path(root, "cuda/std").glob("[a-z]*")]
    headers = {name: _STANDARD.format(name) for name in names}
    headers |= {f"{name[1:]}.h": f"#include <{name}>\n" for name in names if name[0] == "c"}
    return {**headers, "cstdio": "\n", "stdio.h": "\n"}  # printf is built in


def parameters_of(ptx: str) -> dict[str, tuple[Parameter, ...]]:
    """The parameters of each kernel in ``ptx``, by symbol."""
    return {
        symbol: tuple(
            Parameter(kind, int(count) if count else int(re.sub(r"\D", "", kind)) // 8)
            for kind, count in _PARAMETER.findall(listed)
        )
        for symbol, listed in _ENTRY.findall(ptx)
    }


def plain_name(symbol: str) -> str | None:
    """The qualified name of a kernel's symbol; ``None`` for an instance of a template."""
    name = demangle(symbol).replace("(anonymous namespace)::", "").partition("(")[0]
    return None if "<" in name else name


def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc

        _checked(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:
        raise NvrtcNotFoundError(
            "backend='nvrtc' needs NVRTC and NVIDIA's Python bindings of it, which were not found "
            f"({str(error).splitlines()[0]}). Install {extra('nvrtc')}."
        ) from error
    return nvrtc


def _toolkit_includes() -> list[str]:
    from cuda.pathfinder import find_nvidia_header_directory

    found = filter(None, map(find_nvidia_header_directory, ("cudart", "cccl")))
    return [root for place in found for root in (place, f"{place}/cccl")]


def _checked(result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code) != 0:
        raise LoaderError(f"NVRTC: {code.name}")
    return values[0] if values else None


def _bytes(nvrtc: Any, program: Any, what: str) -> bytes:
    buffer: bytes = b" " * _checked(getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    _checked(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer
