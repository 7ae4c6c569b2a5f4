"""The machine of ``emulation/``: what a GPU leaves undefined as a kernel begins fails there.

And what several threads find that launch at once.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
from host_code import FLAGS, compiled, compiler, link

from .emulated import ALIGNED, EMULATION, KERNELS

HEADERS = sorted(
    path.relative_to(KERNELS).as_posix()
    for path in (*KERNELS.rglob("*.cuh"), *KERNELS.rglob("*.h"))
    if path.parent.name not in ("bindings", "declared")
)
NOTHING, READS, WRITES, COPIES, PREFETCHES, MISALIGNS, READS_EARLY = range(7)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    folder = tmp_path_factory.mktemp("emulation")
    unchecked = "-U_FORTIFY_SOURCE"
    objects = [compiled(["-O2", unchecked, EMULATION / "machine.cpp"])]
    machine = link(objects, folder / "libmachine.so")
    own = ["-fvisibility=hidden", "-fno-gnu-unique", "-fno-extern-tls-init"]
    include = [f"-I{EMULATION}", f"-I{KERNELS / 'include'}"]
    source = Path(__file__).with_name("violations.cpp")
    made = compiled(["-Og", "-w", unchecked, *own, *ALIGNED, *include, source])
    kernels = link([made], folder / "violations.so", machine)
    loaded = ctypes.CDLL(str(machine)), ctypes.CDLL(str(kernels))
    loaded[0].emulation_error.restype = ctypes.c_char_p
    loaded[0].emulation_allocate.restype = ctypes.c_size_t
    loaded[0].emulation_allocate.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    return loaded


@pytest.mark.parametrize("grid", [1, 40])
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    ("what", "error"),
    [
        (NOTHING, ""),
        (READS, "reads or writes a tensor before it waits"),
        (WRITES, "reads or writes a tensor before it waits"),
        (COPIES, "reaches past the end of a tensor's memory"),
        (PREFETCHES, "a prefetch outside of all tensors"),
        (MISALIGNS, "an address is not aligned to what is loaded or stored there"),
    ],
)
def test_violations(
    libraries: tuple[ctypes.CDLL, ctypes.CDLL], what: int, error: str, descending: bool, grid: int
) -> None:
    machine, kernels = libraries
    machine.emulation_use(0, int(descending))
    memory = machine.emulation_allocate(20, 0)
    values = (ctypes.c_float * 4).from_address(memory)
    values[:] = (1.0, 2.0, 3.0, 4.0)
    status = kernels.violate(what, ctypes.c_void_p(memory), grid)
    assert error in machine.emulation_error().decode()
    assert (status == 0) == (error == "")
    if not error:
        assert list(values) == [1.0 + grid, 2.0 + grid, 3.0 + grid, 4.0 + grid]
    machine.emulation_release_all()


@pytest.mark.parametrize("descending", [False, True])
def test_what_the_kernel_before_writes_is_read_after_the_wait(
    libraries: tuple[ctypes.CDLL, ctypes.CDLL], descending: bool
) -> None:
    machine, kernels = libraries
    for same in (False, True):
        machine.emulation_use(0, int(descending))
        first, second = (machine.emulation_allocate(20, 0) for _ in range(2))
        assert kernels.violate(NOTHING, ctypes.c_void_p(first), 1) == 0
        memory = first if same else second
        status = kernels.violate(READS_EARLY, ctypes.c_void_p(memory), 1)
        assert (status == 0) != same
        assert ("before it waits" in machine.emulation_error().decode()) == same
        machine.emulation_release_all()


@pytest.mark.parametrize(
    ("columns", "warps", "shape"),
    [
        (8192, 32, (0, 0)),  # fits into a thread block
        (18432, 24, (3, 192)),
        (28672, 32, (7, 128)),
        (32768, 32, (4, 256)),
        (53248, 32, (7, 256)),
        (53248, 28, (8, 224)),
        (65536, 32, (8, 256)),
        (65536, 0, (8, 256)),  # not known
        (65568, 32, (0, 0)),
    ],
)
def test_the_cluster_of_a_long_row(
    libraries: tuple[ctypes.CDLL, ctypes.CDLL], columns: int, warps: int, shape: tuple[int, int]
) -> None:
    """Of those whose blocks an SM holds, that of which the most rows fit."""
    machine, kernels = libraries
    machine.emulation_use(0, 0)
    made = (ctypes.c_int * 2)()
    kernels.cluster_of(columns // 32, warps, made)
    assert tuple(made) == shape


def test_a_cached_answer_comes_with_what_it_was_asked_for(tmp_path: Path) -> None:
    program = tmp_path / "threads"
    include = [f"-I{EMULATION}", f"-I{KERNELS / 'include'}"]
    source = Path(__file__).with_name("threads.cpp")
    checks = ["-w", "-O1", "-pthread", "-fsanitize=thread"]
    command = [*compiler(), *FLAGS, *checks, *include, str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "tsan" in built.stderr:
        pytest.skip("the compiler has no thread sanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 1\n"


@pytest.mark.slow
@pytest.mark.parametrize("header", HEADERS)
def test_a_header_includes_what_it_needs(header: str) -> None:
    include = [f"-I{EMULATION}", f"-I{KERNELS / 'include'}"]
    compiled(["-w", *include, "-DTORCH_EXTENSION_NAME=alone", "-xc++", KERNELS / header])
