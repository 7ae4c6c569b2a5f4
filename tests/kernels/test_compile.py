"""Every kernel file: through nvcc alone, and compiled, linked and loaded by the loader."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch

from jitquant.loader import Loader, NvccNotFoundError
from jitquant.loader.toolchain import Memo, find_nvcc

KERNELS = Path(__file__).parents[2] / "kernels_cu"
SOURCES = sorted(path.name for path in KERNELS.glob("*.cu"))
ARCHS = ("80", "86", "89", "90a", "100a", "103a", "110a", "120a", "121a")
EXPORTS = {
    "amax": ["amax"],
    "amax_gsa": ["compute_amax_gsa"],
    "deinterleave_quantize": [
        "deinterleave_amax_quantize_nvfp4",
        "deinterleave_quantize_nvfp4",
        "deinterleave_quantize_nvfp4_from_amax",
    ],
    "dequant_nvfp4": ["dequant_nvfp4"],
    "dequantize": ["dequantize"],
    "dequantize_grouped": ["dequantize_grouped_fp8", "dequantize_grouped_nvfp4"],
    "fused_amax_quantize": [
        "amax_quantize_nvfp4",
        "deinterleave_quantize_from_buffer",
        "quantize_nvfp4_from_amax",
        "quantize_nvfp4_from_buffer",
    ],
    "fused_mhc_rmsnorm_quantize": [
        "mhc_rmsnorm_amax",
        "mhc_rmsnorm_quantize_nvfp4",
        "mhc_rmsnorm_quantize_nvfp4_from_amax",
        "mhc_rmsnorm_quantize_nvfp4_from_buffer",
    ],
    "fused_rmsnorm_quantize": [
        "rmsnorm_amax",
        "rmsnorm_quantize_nvfp4",
        "rmsnorm_quantize_nvfp4_from_amax",
        "rmsnorm_quantize_nvfp4_from_buffer",
    ],
    "quantize_block": ["quantize_block"],
    "quantize_both": ["quantize_block_both", "quantize_group_both", "quantize_mxfp8_both"],
    "quantize_fp8": ["quantize_fp8", "quantize_fp8_from_amax"],
    "quantize_group": ["quantize_group"],
    "quantize_grouped": ["quantize_grouped_fp8"],
    "quantize_grouped_grad": ["quantize_grouped_grad_fp8"],
    "quantize_grouped_nvfp4": ["quantize_grouped_nvfp4"],
    "quantize_mxfp8": ["quantize_mxfp8"],
    "quantize_nvfp4": ["quantize_nvfp4"],
    "quantize_weight_nvfp4": [
        "quantize_weight_nvfp4",
        "quantize_weight_nvfp4_from_amax",
        "quantize_weight_nvfp4_from_buffer",
    ],
    "rmsnorm_quantize": ["rmsnorm_quantize_fp8", "rmsnorm_quantize_group"],
    "silu_mul_quantize": ["silu_mul_quantize_fp8", "silu_mul_quantize_fp8_from_amax"],
    "silu_mul_quantize_group": ["silu_mul_quantize_group"],
}


@pytest.fixture(scope="module")
def nvcc() -> str:
    try:
        return find_nvcc(Memo())[0].path
    except NvccNotFoundError as error:
        pytest.skip(f"no nvcc: {error}")


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    return Loader(cache_dir=tmp_path_factory.mktemp("cache"), capturing=lambda: False)


def _gencode(arch: str) -> str:
    return f"-gencode=arch=compute_{arch},code=sm_{arch}"


def test_the_table_names_every_kernel_file() -> None:
    assert [f"{name}.cu" for name in sorted(EXPORTS)] == SOURCES


@pytest.mark.parametrize("source", SOURCES)
def test_no_torch_header_in_device_code(source: str) -> None:
    files = [KERNELS / source, *(KERNELS / "include" / "jitquant").iterdir()]
    for path in files:
        assert not re.search(r'#include\s*[<"](torch|ATen|c10|pybind11)/', path.read_text()), path


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_the_loader_builds_and_loads(name: str, loader: Loader, nvcc: str) -> None:
    module = loader.get(name, [f"{name}.cu"], archs=("90a", "100a"))
    assert [f for f in EXPORTS[name] if not hasattr(module, f)] == []
    for function in EXPORTS[name]:
        assert {"default", "out"} <= set(getattr(module, function).overloads())
        # What is not on a GPU is not for the way past the dispatcher.
        schema = getattr(module, function).default._schema
        arguments = [torch.ones(1, 16)] * len(schema.arguments)
        for for_dispatcher in (True, False):
            direct = getattr(module, f"direct_{function}")
            assert direct(for_dispatcher, *arguments) is NotImplemented
    # Kernels are listed for residency by their library and by no other.
    library = ctypes.CDLL(str(module.path))
    assert library.jitquant_make_resident() != 0  # there is no device: the call says so


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("arch", ["90a", "100a"])
def test_no_spills_and_no_stack(source: str, arch: str, nvcc: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(nvcc, "-std=c++17", "-O3", "-Xptxas=-v", "-cubin", f"-I{KERNELS / 'include'}"),
            *(f"-arch=sm_{arch}", str(KERNELS / source), "-o", str(tmp_path / "out.cubin")),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    report = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", done.stderr)
    assert report
    assert set(report) == {("0", "0")}, done.stderr


@pytest.mark.parametrize("source", SOURCES)
def test_every_supported_architecture(source: str, nvcc: str, tmp_path: Path) -> None:
    subprocess.run(
        [
            *(nvcc, "-std=c++17", "--threads=2", *map(_gencode, ARCHS), "-c"),
            *(f"-I{KERNELS / 'include'}", str(KERNELS / source), "-o", str(tmp_path / "out.o")),
        ],
        check=True,
    )


@pytest.mark.parametrize(("arch", "expected"), [("90a", False), ("100a", True), ("120a", True)])
def test_the_e2m1_instruction_is_used_where_it_is(
    arch: str, expected: bool, nvcc: str, tmp_path: Path
) -> None:
    ptx = tmp_path / "out.ptx"
    subprocess.run(
        [
            *(nvcc, "-std=c++17", "-ptx", f"-arch=compute_{arch}", f"-I{KERNELS / 'include'}"),
            *(str(KERNELS / "quantize_nvfp4.cu"), "-o", str(ptx)),
        ],
        check=True,
    )
    assert ("cvt.rn.satfinite.e2m1x2.f32" in ptx.read_text()) is expected
