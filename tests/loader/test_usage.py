"""What kernels take: as the assembler says, against cuobjdump and NVIDIA's occupancy calculator."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from jitquant.loader.compile.usage import KernelUsage, occupancy, split_usage
from jitquant.loader.errors import LoaderError
from jitquant.loader.machine.memo import Memo
from jitquant.loader.machine.symbols import demangle
from jitquant.loader.machine.toolchain import find_host_compiler, find_nvcc
from jitquant.loader.tools.inspect import find_tool

from .conftest import Toy
from .toys import entries

SAID = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4callPf' for 'sm_90a'
ptxas info    : Function properties for _Z4callPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compile time = 2.303 ms
ptxas info    : Function properties for _Z1ff
    16 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
k.cu(3): warning #177-D: variable "x" was declared but never referenced
ptxas info    : Compiling entry function '_Z5spillPfi' for 'sm_120f'
ptxas info    : Function properties for _Z5spillPfi
    872 bytes stack frame, 940 bytes spill stores, 1324 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 872 bytes cumulative stack size, 400 bytes smem
"""

PROPERTIES = """
#include <cuda_occupancy.h>
#include <cstdio>
#include <cstdlib>
// arguments: major minor warps shared_kib registers shared threads
int main() {
  int major, minor, warps, kib, registers, threads; size_t shared, dynamic;
  while (scanf("%d %d %d %d %d %zu %zu %d", &major, &minor, &warps, &kib, &registers, &shared,
               &dynamic, &threads) == 8) {
    cudaOccDeviceProp p;
    p.computeMajor = major; p.computeMinor = minor; p.maxThreadsPerBlock = 1024;
    p.maxThreadsPerMultiprocessor = warps * 32; p.regsPerBlock = p.regsPerMultiprocessor = 65536;
    p.warpSize = 32; p.sharedMemPerBlock = 48 << 10; p.sharedMemPerMultiprocessor = kib << 10;
    p.numSms = 1; p.sharedMemPerBlockOptin = (kib - 1) << 10; p.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes a;
    a.maxThreadsPerBlock = 1024; a.numRegs = registers; a.sharedSizeBytes = shared;
    a.partitionedGCConfig = PARTITIONED_GC_OFF; a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    a.maxDynamicSharedSizeBytes = 1 << 20; a.numBlockBarriers = 1;
    cudaOccDeviceState s;
    s.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult r;
    cudaOccError e = cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, threads, dynamic);
    printf("%d\\n", e == CUDA_OCC_SUCCESS ? r.activeBlocksPerMultiprocessor : -(int)e);
  }
}
"""

#: Resident threads and KiB of shared memory of a multiprocessor, as the CUDA Programming Guide's
#: table of technical specifications has them; the calculator takes these from the device.
SPECIFIED = {
    "80": (2048, 164),
    "86": (1536, 100),
    "87": (1536, 164),
    "89": (1536, 100),
    "90a": (2048, 228),
    "100a": (2048, 228),
    "103a": (2048, 228),
    "110a": (1536, 228),
    "120f": (1536, 100),
    "121a": (1536, 100),
}


def kernel(arch: str, registers: int = 32, shared: int = 0) -> KernelUsage:
    return KernelUsage("_Z1kv", arch, registers, 0, 0, 0, shared)


def test_what_the_assembler_says_is_read_and_warnings_are_left() -> None:
    kernels, rest = split_usage(SAID)
    assert kernels == [
        KernelUsage("_Z4callPf", "90a", 8, 0, 0, 0, 0),
        KernelUsage("_Z5spillPfi", "120f", 32, 872, 940, 1324, 400),
    ]
    assert rest.strip() == 'k.cu(3): warning #177-D: variable "x" was declared but never referenced'
    assert kernels[1].name == "spill(float*, int)"
    assert kernels[1].short_name == "spill"


def test_names() -> None:
    assert demangle("_ZN2jq4nameEPKfi") == "jq::name(float const*, int)"
    assert demangle("plain_c_name") == "plain_c_name"


def test_a_build_keeps_what_its_kernels_take(toy: Toy) -> None:
    from jitquant.loader.store.cache import Entry

    (directory,) = entries(toy.cache)
    entry = Entry.from_json((directory / "entry.json").read_bytes())
    (kernel,) = entry.info["kernels"]
    used = KernelUsage(**kernel)
    assert used.name == "multiply(float*, int)"
    assert used.arch == "90a"
    try:
        cuobjdump = find_tool("cuobjdump")
    except LoaderError as error:
        pytest.skip(str(error))
    said = subprocess.run(
        [cuobjdump, "--dump-resource-usage", directory / entry.library],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    shown = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", said)
    assert shown is not None
    assert (used.registers, used.stack) == (int(shown[1]), int(shown[2]))
    # For some kernels cuobjdump adds the 1 KiB that the system takes of each block.
    assert int(shown[3]) - used.shared in (0, 1024)
    labels = [label for label, _ in entry.info["steps"]]
    assert labels[0].startswith(("nvcc toy.cu", "g++ toy.cpp"))
    assert labels[-1] == "linking and first load"


def test_occupancy_is_that_of_the_cuda_occupancy_calculator(nvcc: None, tmp_path: Path) -> None:
    memo = Memo()
    source, program = tmp_path / "calculator.cpp", tmp_path / "calculator"
    source.write_text(PROPERTIES)
    include = [d for d in find_nvcc(memo)[0].include_dirs if Path(d, "cuda_occupancy.h").is_file()]
    if not include:
        pytest.skip("this toolkit has no cuda_occupancy.h")
    subprocess.run(
        [find_host_compiler(memo).program, "-w", "-I", include[0], source, "-o", program],
        check=True,
    )
    cases = [
        (arch, registers, shared, dynamic, threads)
        for arch in SPECIFIED
        for registers in (1, 16, 32, 40, 64, 72, 128, 168, 255)
        for shared, dynamic in ((0, 0), (144, 0), (1000, 9000), (0, 50_000), (16, 200_000))
        for threads in (1, 32, 96, 128, 200, 256, 384, 512, 768, 1024)
    ]
    lines = []
    for arch, registers, shared, dynamic, threads in cases:
        number = int(re.sub(r"\D", "", arch))
        resident, kib = SPECIFIED[arch]
        lines.append(
            f"{number // 10} {number % 10} {resident // 32} {kib} {registers} {shared} {dynamic} "
            f"{threads}"
        )
    said = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(said) == len(cases)
    wrong = []
    for (arch, registers, shared, dynamic, threads), answer in zip(cases, said, strict=True):
        mine = occupancy(kernel(arch, registers, shared), threads, dynamic)
        assert mine is not None
        assert mine.occupancy == mine.blocks * -(-threads // 32) * 32 / SPECIFIED[arch][0]
        if mine.blocks != int(answer):
            wrong.append((arch, registers, shared, dynamic, threads, mine, answer))
    assert wrong == []


def test_occupancy_names_its_limit() -> None:
    def limit(registers: int, threads: int, dynamic: int = 0) -> str:
        found = occupancy(kernel("90a", registers), threads, dynamic)
        assert found is not None
        return found.limit

    assert limit(16, 32) == "blocks"
    assert limit(16, 256) == "warps"
    assert limit(128, 256) == "registers"
    assert limit(16, 256, 100_000) == "shared memory"


@pytest.mark.parametrize("threads", [0, 1025])
def test_blocks_of_no_possible_size_are_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="give 1 to 1024"):
        occupancy(kernel("90a"), threads)


def test_an_architecture_without_known_limits_has_no_occupancy() -> None:
    assert occupancy(kernel("75"), 256) is None
