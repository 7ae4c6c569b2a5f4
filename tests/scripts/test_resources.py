"""The table of registers, spills, shared memory and occupancy: how it is made, and that it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import spills
from harness.bench import resources
from harness.provenance import kernels_digest

from jitquant.loader import Loader, NvccNotFoundError
from jitquant.loader.machine.memo import Memo
from jitquant.loader.machine.toolchain import find_nvcc

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels_cu"
AGAIN = "run ./scripts/bench resources --out results"

SOURCE = """
__global__ void few_kernel(float* x) { x[threadIdx.x] *= 2; }
template <class T> __global__ void shared_kernel(T* x) {
  __shared__ T all[256];
  all[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = all[255 - threadIdx.x];
}
void twice(float* x, cudaStream_t stream) {
  few_kernel<<<1, 256, 0, stream>>>(x);
  shared_kernel<<<1, 256, 0, stream>>>(x);
}
"""


@pytest.mark.nvcc
def test_the_table_is_made_from_builds(tmp_path: Path) -> None:
    try:
        find_nvcc(Memo())
    except NvccNotFoundError as error:
        pytest.skip(f"no nvcc: {error}")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "mine.cu").write_text(SOURCE)
    loader = Loader(
        cache_dir=tmp_path / "cache",
        kernels_dir=tmp_path / "kernels",
        capturing=lambda: False,
        native=lambda: (),
    )
    built = resources.builds(loader, "90a")
    assert list(built) == ["mine"]
    text = resources.document(built, "90a", "0123")
    assert "## mine\n" in text
    said = " ".join(text.split())
    assert "2 kernels, none with a stack or spills." in said
    assert re.search(
        r"for sm_90a: what the assembler of nvcc [\d.]+ said of `kernels_cu` 0123", said
    )
    row = r"\| `%s` \| \d+ \| 0 \| 0 \| %d \| 100%% \| 100%% \| 100%% \|\n"
    assert re.search(row % ("few_kernel", 0), text)
    assert re.search(row % ("shared_kernel<float>", 1024), text)


def _kernels(text: str) -> list[str]:
    found = re.findall(r"__global__[^{;]*?\b(\w+_kernel)\(", text)
    assert len(found) == text.count("__global__")
    return found


@pytest.fixture
def table() -> str:
    return (ROOT / "results" / "kernels-resources.md").read_text()


@pytest.mark.slow
def test_the_committed_table_is_of_these_sources(table: str) -> None:
    assert f"`kernels_cu` {kernels_digest()}." in " ".join(table.split()), AGAIN


def test_the_committed_table_is_within_the_bounds(table: str) -> None:
    modules = table.split("\n## ")[1:]
    over = [
        f"{module}: {name} has a stack of {stack} and spills {spilled}"
        for module, _, text in (section.partition("\n") for section in modules)
        for name, stack, spilled in re.findall(r"\| `(.+)` \| \d+ \| (\d+) \| (\d+) \|", text)
        if spills.exceed(module, int(spilled), int(stack))
    ]
    assert not over, "\n".join(over)


def test_the_committed_table_has_every_kernel(table: str) -> None:
    hint = f"is not in results/kernels-resources.md: {AGAIN}"
    for path in KERNELS.rglob("*.cu*"):
        if path.suffix == ".cu":
            assert f"\n## {path.stem}\n" in table, f"{path.name} {hint}"
        for name in _kernels(path.read_text()):
            assert re.search(rf"\| `{name}[<`]", table), f"{name} {hint}"
