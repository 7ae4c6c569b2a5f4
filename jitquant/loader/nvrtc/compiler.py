"""NVRTC, through NVIDIA's own bindings: from CUDA C++ to a cubin without nvcc or a host compiler.

The library comes with a CUDA build of torch, with a toolkit, or with the extra ``nvrtc``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..diagnostics import compile_error
from ..errors import LoaderError, NvrtcNotFoundError, extra
from ..machine.symbols import demangle

_CCCL = (
    "array atomic bit climits concepts cstddef cstdint cstdlib cstring functional "
    "initializer_list limits numeric optional span tuple type_traits utility"
)
_MATH = (
    "acos asin atan atan2 cbrt ceil copysign cos cosh erf exp exp2 expm1 fabs floor fma fmax fmin "
    "fmod isfinite isinf isnan ldexp log log10 log1p log2 lround nearbyint pow rint round sin sinh "
    "sqrt tan tanh trunc"
)
#: The C++ library's headers, which NVRTC has not: CCCL's, or what the compiler has built in.
_STANDARD = {
    **{
        name: f"namespace cuda {{ namespace std {{}} }}\n#include <cuda/std/{name}>\n"
        "namespace std { using namespace ::cuda::std; }\n"
        for name in _CCCL.split()
    },
    "cmath": f"namespace std {{ {' '.join(f'using ::{name};' for name in _MATH.split())} }}\n",
    **dict.fromkeys(("cassert", "assert.h", "cstdio", "stdio.h", "math.h", "stdlib.h"), "\n"),
    **{f"{name}.h": f"#include <c{name}>\n" for name in ("limits", "stddef", "stdint")},
}
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,\[]*(?:\[(\d+)\])?")


class Parameter(NamedTuple):
    """A kernel's parameter as PTX has it: ``"f32"``, ``"u64"`` (a pointer too), ``"b8"`` bytes."""

    kind: str
    size: int


@dataclass(frozen=True, eq=False)
class Cubin:
    """Compiled code, and the symbols and parameters of its kernels.

    These are listed by qualified name or by the expression asked for.
    """

    code: bytes
    kernels: dict[str, tuple[str, tuple[Parameter, ...]]]


def compile_cubin(
    module: str, source: str, text: bytes, options: Sequence[str], expressions: Sequence[str]
) -> Cubin:
    """Compile ``text``, that of ``source``; ``expressions`` name instances of templates."""
    nvrtc = _bindings()
    file, names = os.fsencode(source), [header.encode() for header in _STANDARD]
    headers = [text.encode() for text in _STANDARD.values()]
    program = _checked(nvrtc.nvrtcCreateProgram(text, file, len(names), headers, names))
    try:
        for expression in expressions:
            _checked(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        given = [os.fsencode(option) for option in (*options, *_include_options())]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        if int(code) != 0:
            log = _bytes(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0\n")
            command = ["nvrtc", *options, source]
            failed = (command, "NVRTC")
            raise compile_error(module, failed, int(code), log or code.name, Path(source).parent)
        found = parameters_of(_bytes(nvrtc, program, "PTX").decode(errors="replace"))
        symbols = {plain: symbol for symbol in found if (plain := plain_name(symbol)) is not None}
        for expression in expressions:
            lowered = _checked(nvrtc.nvrtcGetLoweredName(program, expression.encode()))
            symbols[expression] = lowered.decode()
        kernels = {name: (symbol, found[symbol]) for name, symbol in symbols.items()}
        return Cubin(_bytes(nvrtc, program, "CUBIN"), kernels)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


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


def _include_options() -> list[str]:
    """Where the CUDA headers are."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = filter(None, map(find_nvidia_header_directory, ("cudart", "cccl")))
    return [option for place in found for option in (f"-I{place}", f"-I{place}/cccl")]


def _checked(result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code) != 0:
        raise LoaderError(f"NVRTC: {code.name}")
    return values[0] if values else None


def _bytes(nvrtc: Any, program: Any, what: str) -> bytes:
    buffer: bytes = b" " * _checked(getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    _checked(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer
