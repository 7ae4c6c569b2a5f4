"""``jitquant new``: a kernel to start from, which works."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import keyword
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from jitquant.loader.machine.trust import write_output
from jitquant.loader.module import CudaModule
from jitquant.loader.request.sources import check_name

from .output import Json, console, print_json

_KERNEL = """\
// out = x * s, element by element.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "jitquant/device.cuh"
#include "jitquant/export.h"

namespace {

template <class T>
__global__ void NAME_kernel(const T* x, float s, T* out, int64_t n) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i < n; i += stride) out[i] = static_cast<T>(static_cast<float>(x[i]) * s);
}

}  // namespace

#ifndef __CUDACC_RTC__  // the host half, which backend="nvrtc" leaves out
namespace {

template <class T>
cudaError_t launch_typed(const jitquant::TensorView& x, float s, const jitquant::TensorView& out,
                         cudaStream_t stream) {
  constexpr int kThreads = 256;
  const T* from = x.contiguous().data<const T>();
  T* to = out.with_shape_of(x).contiguous().data<T>();
  const int64_t n = x.numel();
  if (n == 0) return cudaSuccess;
  const int64_t blocks = jitquant::persistent_grid((n + kThreads - 1) / kThreads, 8);
  return jitquant::launch<&NAME_kernel<T>>({blocks, kThreads}, stream, from, s, to, n);
}

}  // namespace

cudaError_t launch_NAME(const jitquant::TensorView& x, float s, const jitquant::TensorView& out,
                        cudaStream_t stream) {
  switch (x.dtype) {
    case jitquant::ElementType::kFloat32:
      return launch_typed<float>(x, s, out, stream);
    case jitquant::ElementType::kFloat16:
      return launch_typed<__half>(x, s, out, stream);
    case jitquant::ElementType::kBFloat16:
      return launch_typed<__nv_bfloat16>(x, s, out, stream);
    default:
      jitquant::refuse("x: expected float32, float16 or bfloat16, got %s",
                       jitquant::element_name(x.dtype));
  }
}

JITQUANT_EXPORT(launch_NAME, "NAME(Tensor x, float s, *, Tensor(a!) out) -> ()")
JITQUANT_EXPORT_RESIDENT()
#endif
"""

_OPERATOR = '''\
"""The operator NAME: ``x * s``, by NAME.cu on a GPU and in plain PyTorch elsewhere."""

from pathlib import Path

import jitquant
import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("NAME.cu")


def module() -> jitquant.loader.CudaModule:
    """The compiled module, as the source is now."""
    return jitquant.get_cuda_module("NAME", [SOURCE])


def reference(x: Tensor, s: float) -> Tensor:
    """What the kernel has to give: the product in fp32, rounded once to the dtype of x."""
    return (x.float() * s).to(x.dtype)


@torch.library.custom_op("NAME::NAME", mutates_args=(), device_types="cpu")
def NAME(x: Tensor, s: float) -> Tensor:
    """``x * s`` in the shape and dtype of x, contiguous."""
    return reference(x, s).contiguous()


@NAME.register_kernel("cuda")
def _(x: Tensor, s: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    module().NAME(x.contiguous(), s, out=out)
    return out


@NAME.register_fake
def _(x: Tensor, s: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
'''

_TEST = '''\
"""NAME against its reference, on the CPU and, if there is one, on a GPU."""

import jitquant
import pytest
import torch
from jitquant.loader import NvccNotFoundError

from NAME import MEMBERS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def samples(dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1,), (3, 257), (0, 4), (5, 7, 11)]
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    return [*tensors, torch.randn(16, 8, device=device).to(dtype).t()]


def test_the_reference_by_hand() -> None:
    x = torch.tensor([1.0, -2.0, 0.0, float("inf")])
    assert reference(x, 0.5).tolist() == [0.5, -1.0, 0.0, float("inf")]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operator_on_the_cpu(dtype: torch.dtype) -> None:
    for x in samples(dtype, "cpu"):
        assert torch.equal(NAME(x, 1.5), reference(x, 1.5))


def test_the_operator_is_declared_as_it_behaves() -> None:
    torch.library.opcheck(NAME, (samples(torch.float32, "cpu")[-1], 1.5))


def test_the_kernel_compiles_and_refuses_what_it_cannot_do() -> None:
    try:
        compiled = module()
    except NvccNotFoundError as error:
        pytest.skip(f"there is no CUDA compiler: {error}")
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="x: expected a tensor on cuda"):
        compiled.NAME(x, 2.0, out=torch.empty(3))


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_gives_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    for x in samples(dtype, "cuda"):
        assert torch.equal(NAME(x, 1.5), reference(x, 1.5))


@needs_gpu
def test_the_kernel_refuses_wrong_tensors() -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="out must have the shape of x"):
        module().NAME(x, 2.0, out=torch.empty(4, device="cuda"))
    with pytest.raises(RuntimeError, match="x: expected float32, float16 or bfloat16, got int64"):
        module().NAME(x.long(), 2.0, out=x.long())


@needs_gpu
def test_the_kernel_can_be_captured() -> None:
    module()
    jitquant.warmup("NAME")
    jitquant.testing.assert_capturable(NAME, torch.randn(1000, device="cuda"), 1.5)
'''

_FILES = {"{name}.cu": _KERNEL, "{name}.py": _OPERATOR, "test_{name}.py": _TEST}
#: What CudaModule gives each object, besides what the class has.
_OF_MODULES = ("_functions", "archs", "extension_name", "key", "library", "path")
#: What torch.ops cannot have as a namespace with an operator of the same name.
_OF_TORCH_OPS = (
    "_dir",
    "higher_order",
    "import_module",
    "load_library",
    "loaded_libraries",
    "name",
    "prim",
)


def _meant() -> set[Any]:
    """Names that mean something else in the files, on a compiled module or in torch.ops."""
    nodes = [node for text in (_OPERATOR, _TEST) for node in ast.walk(ast.parse(text))]
    names = {
        getattr(node, field, None)
        for node in nodes
        for field in ("id", "arg", "name")
        if not isinstance(node, ast.keyword)
    }
    launchers = re.findall(r"\blaunch_(\w+)", _KERNEL)
    used = {*names, *launchers} - {None, "NAME", "MEMBERS"}
    return {*used, *dir(CudaModule), *_OF_MODULES, *_OF_TORCH_OPS}


def files_of(name: str) -> dict[str, str]:
    """The files of a new kernel: their names and texts.

    Raises:
        ValueError: the name cannot be that of a C function and a Python module, or is taken.
        TypeError: it is not a string.
    """
    check_name(name)
    if keyword.iskeyword(name) or name in sys.stdlib_module_names or hasattr(builtins, name):
        raise ValueError(f"name: {name!r} means something in Python already; choose another.")
    spec = importlib.util.find_spec(name)
    origin = spec.origin if spec is not None else None  # a folder that is no package has none
    if name in sys.modules or origin:
        where = f" ({origin})" if origin else ""
        raise ValueError(
            f"name: there is a Python module {name!r} already{where}, and {name}.py would hide it; "
            "choose another."
        )
    if name in _meant():
        raise ValueError(
            f"name: {name!r} means something else in the generated files or on a compiled module; "
            "choose another."
        )
    members = ", ".join(sorted([name, "module", "reference"], key=lambda m: (m.islower(), m)))
    put = {"NAME": name, "MEMBERS": members}
    return {
        file.format(name=name): re.sub("|".join(put), lambda found: put[found[0]], text)
        for file, text in _FILES.items()
    }


def write_new(name: str, directory: Path) -> list[Path]:
    """Write the files of a new kernel; none if one of them is there already.

    Raises:
        ValueError: as :func:`files_of`, or a file is there already.
        OSError: a file cannot be written.
    """
    for file in _FILES:  # before it is looked for as a module, which its own file would be
        path = directory / file.format(name=check_name(name))
        if path.exists():
            raise ValueError(f"{path} exists already; choose another name, or another --dir.")
    files = {directory / file: text for file, text in files_of(name).items()}
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        write_output(path, text)
    return list(files)


def new(
    name: Annotated[str, typer.Argument(help="The kernel's name, an identifier.")],
    directory: Annotated[Path, typer.Option("--dir", help="Where to write the files.")] = Path(),
    json: Json = False,
) -> None:
    """Generate a working starter kernel: NAME.cu, its operator NAME.py, and test_NAME.py.

    Kernel and launcher share one file; the binding is generated from it. The operator has a
    reference in plain PyTorch, which runs on the CPU.
    """
    paths = write_new(name, directory)
    if json:
        print_json({"files": paths})
        return
    out = console()
    for path in paths:
        out.print(f"wrote {path}", markup=False)
    source, test = (shlex.quote(str(path)) for path in (paths[0], paths[-1]))
    out.print(f"try: python -m pytest {test}", markup=False)
    out.print(f"then: jitquant watch {source} -- python -m pytest {test}", markup=False)
