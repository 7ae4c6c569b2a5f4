"""The kernels, run on the CPU: their walks, reductions, layouts and edges, against the reference.

Every op is called as on a GPU, from the Python that allocates to the kernels' stores, with the
machine of ``emulation/`` in the GPU's place: first with the samples of all tests, then with shapes
that take the kernels' other ways. What an op does not write must keep the byte that was there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import golden
import golden_recipes
import pytest
import torch
from ops import test_errors, test_errors_fp8
from samples import (
    ALL_SAMPLES,
    DTYPES,
    SAMPLES,
    Arguments,
    Sample,
    assert_nearly,
    byte_view,
    poisoned_buffers,
    randn,
)
from samples import COMPILED_OPS as OPS
from samples_experts import experts_in_more_launches, experts_in_tiles
from samples_linear import packed
from torch import Tensor

from jitquant import reference
from jitquant.formats import FP8_SCALE_MIN, FP32_TINIEST, RECIPES, SCALE_LAYOUTS
from jitquant.ops import Op
from jitquant.ops.schema import Compiled, Number

from .emulated import POISON, Machine, poisoned
from .emulated_cases import FAMILIES, MORE

GUARD = 256
# Ops whose elements may be strided rows.
APART = [name for name, op in OPS.items() if op.rows_apart and op.results[0] == "data"]


class _Operator:
    """The ``out`` overload of a compiled module's function, as an op calls it."""

    def __init__(self, machine: Machine, op: Op) -> None:
        self._machine, self._op = machine, op

    def out(self, *args: Any, **kwargs: Any) -> None:
        self._machine.call(self._op.module, self._op.function, *args, **kwargs)


@pytest.fixture(scope="module")
def machine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    # Of one op's samples alone, that op's module is enough.
    items = [item for item in request.session.items if item.path == request.path]
    calls = [getattr(item, "callspec", None) for item in items]
    ops = {None if call is None else call.params.get("name") for call in calls}
    modules = {OPS[name].module for name in (OPS if None in ops else ops)}
    machine = Machine(sorted(modules), tmp_path_factory.mktemp("emulated"))
    with pytest.MonkeyPatch.context() as patch:
        for op in OPS.values():
            kept = Compiled(_Operator(machine, op), lambda *_: NotImplemented, lambda: True)
            patch.setattr(op, "_kept", kept)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tensors are small
        yield machine
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checked() -> set[str]:
    """What the tests of this file have been through."""
    return set()


def _guarded(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], gap: int = 0, shift: int = 0
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """For each result its memory, full of POISON, which of that it may write, and the buffer.

    Args:
        op: whose results they are.
        args: of the call.
        kwargs: of the call.
        gap: elements between two rows of ``data``.
        shift: where its first row is, in bytes past a multiple of 64. The other results are as far
            past one as the multiple of 8 below that, since kernels need that alignment.
    """
    buffers = {}
    for name, result in zip(op.results, op.plan(*args, **kwargs).results, strict=True):
        *leading, cols = result.shape
        between, past = (gap, shift) if name == "data" else (0, shift // 8 * 8)
        pitched = (*leading, cols + between, result.dtype.itemsize)
        count = math.prod(pitched)
        memory = torch.full((count + 2 * GUARD + 128,), POISON, dtype=torch.uint8)
        first = GUARD + -(memory.data_ptr() + GUARD) % 64 + past
        own = torch.zeros_like(memory, dtype=torch.bool)
        own[first : first + count].view(pitched)[..., :cols, :] = True
        buffer = memory[first : first + count].view(result.dtype).view(pitched[:-1])[..., :cols]
        buffers[name] = (memory, own, buffer)
    return buffers


def _apart(t: Tensor) -> Tensor:
    """A tensor with NaN, or the largest code, wherever its memory is not its own."""
    if t.numel() == 0:
        return t
    size = t.element_size()
    reach = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) + 1
    memory = torch.full((reach * size + 2 * GUARD + 64,), 0xFF, dtype=torch.uint8)
    # As far from a multiple of 64 bytes as it was.
    first = GUARD + (t.data_ptr() - memory.data_ptr() - GUARD) % 64
    own = memory[first : first + reach * size]
    elements = torch.arange(reach).as_strided(t.shape, t.stride()).reshape(-1)
    # As bytes, since PyTorch lacks copies of some dtypes.
    own.view(reach, size)[elements] = t.contiguous().view(torch.uint8).reshape(-1, size)
    return own.view(t.dtype).as_strided(t.shape, t.stride(), own.storage_offset() // size)


def _arguments(sample: Sample) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = sample.make("cpu")

    def apart(value: Any) -> Any:
        return _apart(value) if isinstance(value, Tensor) else value

    return [apart(value) for value in args], {name: apart(v) for name, v in kwargs.items()}


def _agree(name: str, exact: bool, got: Tensor, expected: Tensor) -> None:
    """Bit for bit; of the fusions all but a few codes, as on a GPU."""
    if exact:
        wrong = (byte_view(got) != byte_view(expected)).nonzero().flatten()
        assert wrong.numel() == 0, f"{name}: {wrong.numel()} bytes differ, first {wrong[:8]}"
        return
    assert_nearly(got, expected, name)


def _check(
    machine: Machine,
    sample: Sample,
    runs: Sequence[tuple[int, bool]],
    places: Sequence[tuple[int, int]] = ((0, 0),),
) -> None:
    """On each device and in each order of ``runs``, with each gap and shift of `_guarded`."""
    op = OPS[sample.op]
    args, kwargs = sample.make("cpu")
    wanted = {name: parts[-1] for name, parts in _guarded(op, args, kwargs).items()}
    op.out(*args, **kwargs, **wanted)
    residual = kwargs.get("residual")
    several = op.results == ("amax", "inv_rms")  # how many maxima there are is the device's affair
    if several:
        wanted["amax"] = wanted["amax"].amax()
    parts = "maxima" in op.results and kwargs.get("granularity") != "row"
    if parts:
        wanted["maxima"] = wanted["maxima"].amax(dim=-1)

    for (device, descending), (gap, shift) in itertools.product(runs, places):
        machine.use(device, descending=descending)
        args, kwargs = _arguments(sample)
        guarded = _guarded(op, args, kwargs, gap, shift)
        got = {name: parts[-1] for name, parts in guarded.items()}
        try:
            op._cuda_out(*args, **kwargs, **got)
            if several:
                assert bool((got["amax"] >= 0).all()), "amax: not all of the maxima are written"
                got["amax"] = got["amax"].amax()
            if parts:
                assert bool((got["maxima"] >= 0).all()), "not all of the maxima are written"
                got["maxima"] = got["maxima"].amax(dim=-1)
            for name in op.results:
                _agree(name, sample.exact, got[name], wanted[name])
            if residual is not None:
                _agree("residual", True, kwargs["residual"], residual)
            for name, (memory, own, _) in guarded.items():
                assert bool((memory[~own] == POISON).all()), f"{name}: written outside of it"
        except (AssertionError, RuntimeError) as error:
            order = "descending" if descending else "ascending"
            raise AssertionError(f"{sample} on device {device}, {order}: {error}") from error


HOPPER = 1
"""A device of compute capability 9.0 with two multiprocessors, as a cluster of two blocks takes."""
TWO_CLUSTERS = 8
"""The same with four, which is none of `machine.devices`."""
BLACKWELL = 7
"""A device of compute capability 10.0 with one."""
ADA = 5
"""A device of compute capability 8.9, whose blocks have 99 KiB of shared memory at most."""


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(OPS))
def test_every_sample(machine: Machine, checked: set[str], name: str, turn: int) -> None:
    """On one device in one order; the second turn is another device in the other order, with
    results between multiples of 16 bytes.
    """
    for i, sample in enumerate(SAMPLES[name]):
        # Tiles take long, and have a test of their own.
        if turn == 0 and name == "nvfp4_linear" and sample.label.startswith("tiles-"):
            continue
        # A kernel of rotated rows is for devices of one size, which few samples meet.
        for t in (0, 1) if name.startswith("rotate_") else (turn,):
            device = (i + 2 * t) % machine.devices
            run = (device, (i // machine.devices + t) % 2 > 0)
            _check(machine, sample, [run], places=((0, 8 * turn),))
    checked.add(name)


def _share(samples: Iterable[Sample], rest: bool) -> Iterator[tuple[int, Sample]]:
    """Every fifth of the samples with its number, or the others."""
    return ((i, sample) for i, sample in enumerate(samples) if (i % 5 > 0) == rest)


each_share = pytest.mark.parametrize(
    "rest", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fifth", "rest"]
)


@each_share
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way(machine: Machine, checked: set[str], family: str, rest: bool) -> None:
    for i, sample in _share(FAMILIES[family](), rest):
        _check(machine, sample, [(0, False), (1 + i % 2, True)])
    checked.add(f"{family} {rest}")


@pytest.mark.slow
@pytest.mark.parametrize("family", MORE)
def test_more_of_every_way(machine: Machine, family: str) -> None:
    for i, sample in enumerate(MORE[family]()):
        _check(machine, sample, [(i % 3, i % 2 > 0)])


@pytest.mark.parametrize("fp16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_products_in_tiles(machine: Machine, checked: set[str], fp16: bool) -> None:
    """Of bf16 in ascending order, of fp16 in descending order."""
    samples = [s for s in SAMPLES["nvfp4_linear"] if s.label.startswith("tiles-")]
    for sample in samples:
        if ("float16" in sample.label.split("-")) == fp16:
            _check(machine, sample, [(HOPPER, fp16)])
    ran = {
        name: ran
        for name, ran in machine.kernels().items()
        if ("nvfp4_linear_tiles" in name or "order_rows" in name) and ("Fp16" in name) == fp16
    }
    assert len(ran) == 32 + (1 if fp16 else 3)
    assert all(ran.values()), [name for name, done in ran.items() if not done]
    checked.add("tiles")


def test_experts_in_tiles(machine: Machine, checked: set[str]) -> None:
    for sample in experts_in_tiles():
        _check(machine, sample, [(HOPPER, False), (TWO_CLUSTERS, True)])
    checked.add("experts in tiles")


@pytest.mark.parametrize("sample", experts_in_more_launches(), ids=str)
def test_experts_in_more_launches(machine: Machine, sample: Sample) -> None:
    """Of more rows, or pairs of a row and an expert, than a launch sorts."""
    _check(machine, sample, [(ADA, False)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_norms_of_16_bits(machine: Machine, checked: set[str], dtype: torch.dtype) -> None:
    """Of more columns than a thread block holds where a norm has more registers per thread."""
    for cols, layout in zip((28688, 32752), SCALE_LAYOUTS, strict=True):
        args = (randn(2, cols, dtype=dtype), randn(cols, dtype=dtype))
        made = (args, {"granularity": "row", "scale_layout": layout})
        sample = Sample("rmsnorm_quantize_nvfp4", str(cols), lambda _, made=made: made)
        _check(machine, sample, [(BLACKWELL, False), (BLACKWELL, True)])
    checked.add("long norms")


def test_products_of_few_rows_on_every_device(machine: Machine) -> None:
    """Plans differ by how much shared memory a thread block may have."""
    for sample in (s for s in SAMPLES["nvfp4_linear"] if s.label.startswith("12x20x2560")):
        _check(machine, sample, [(device, False) for device in range(machine.devices)])


@pytest.mark.parametrize(
    ("rows", "n", "cols"),
    [
        (2, 20, 8448),  # three passes over k: two in one block, one in the other
        (5, 20, 8448),
        (11, 20, 8448),
        (16, 40, 4352),
        pytest.param(16, 336, 4352, marks=pytest.mark.slow),  # more sums than a block keeps at once
    ],
)
def test_products_whose_k_two_blocks_share(machine: Machine, rows: int, n: int, cols: int) -> None:
    args = (randn(rows, cols, dtype=torch.bfloat16), *packed(n, cols, seed=1), torch.ones(1))
    keywords = {"dtype": torch.float32}
    label, made = f"{rows}x{n}x{cols}", (args, keywords)
    sample = Sample("nvfp4_linear", label, lambda _: made, exact=False)
    _check(machine, sample, [(HOPPER, False), (HOPPER, True)])


@pytest.mark.parametrize("rows", [2, 3])
def test_products_in_passes_whose_last_step_lacks_a_tile(machine: Machine, rows: int) -> None:
    """Two tiles side by side, of which the third step of a block has one."""
    args = (randn(rows, 8464, dtype=torch.bfloat16), *packed(176, 8464, seed=1), torch.ones(1))
    keywords = {"dtype": torch.float32}
    sample = Sample("nvfp4_linear", f"{rows}", lambda _: (args, keywords), exact=False)
    _check(machine, sample, [(TWO_CLUSTERS, False)])


@pytest.mark.parametrize("rows", [1, 9])
def test_products_of_the_longest_rows(machine: Machine, rows: int) -> None:
    """Sums of small integers, exact in every order."""
    cols = 65536
    x = (torch.arange(rows * cols).reshape(rows, cols) * 7 % 5 - 2).bfloat16()
    codes = (torch.arange(16 * cols // 2).reshape(16, -1) * 37 % 251).to(torch.uint8)
    scales = torch.full((16, cols // 16), 0x38, dtype=torch.uint8)  # one
    made = ((x, codes, scales, torch.ones(1)), {"dtype": torch.float32})
    sample = Sample("nvfp4_linear", f"{rows}x16x{cols}", lambda _: made)
    _check(machine, sample, [(HOPPER, False), (2, True)])


@pytest.mark.parametrize("rows", [2, 40])
def test_products_of_one_row_that_is_expanded(machine: Machine, rows: int) -> None:
    """Rows without a stride, which tensor maps take too."""
    x = randn(1, 576, dtype=torch.bfloat16).expand(rows, 576)
    made = ((x, *packed(70, 576, seed=1), torch.ones(1)), {"dtype": torch.float32})
    sample = Sample("nvfp4_linear", f"expanded-{rows}", lambda _: made, exact=False)
    _check(machine, sample, [(HOPPER, False)])


def test_sums_of_many_segments(machine: Machine) -> None:
    """So many that each has a whole thread block for its sums, the last with two columns."""
    grad = torch.arange(330 * 1026).reshape(330, 1026).mul(7).remainder(9).sub(4).bfloat16()
    offsets = 1026 * torch.arange(0, 331, 5)
    keywords = {"dtype": torch.float8_e5m2}
    sample = Sample("quantize_ragged_grad_fp8", "", lambda _: ((grad, offsets, None), keywords))
    many_sms = max(range(machine.devices), key=machine.multiprocessors)
    _check(machine, sample, [(many_sms, False)])


@pytest.mark.parametrize(
    ("rows", "cols", "launches"), [(1, 7168, 1), (1, 16416, 1), (2, 48, 2), (3, 7176, 2)]
)
def test_one_gsa_of_one_normed_row_takes_one_launch(
    machine: Machine, rows: int, cols: int, launches: int
) -> None:
    x, weight = randn(rows, cols), randn(cols)
    keywords = {"granularity": "tensor"}
    sample = Sample("rmsnorm_quantize_nvfp4", "", lambda _: ((x, weight), keywords))
    before = machine.launches
    _check(machine, sample, [(HOPPER, False)])
    assert machine.launches == before + launches


@pytest.mark.parametrize(
    ("function", "shape", "segments", "launches"),
    [
        ("quantize_ragged_fp8", (8192,), 512, 1),
        ("quantize_ragged_fp8", (8193,), 1, 2),
        ("quantize_ragged_nvfp4", (4, 2048), 4, 1),
        ("quantize_ragged_nvfp4", (64,), 513, 2),
        ("quantize_ragged_grad_fp8", (1, 7168), 9, 1),
        ("quantize_ragged_grad_fp8", (1, 7168), 10, 2),
        ("quantize_ragged_grad_fp8", (128, 64), 3, 1),
        ("quantize_ragged_grad_fp8", (129, 32), 3, 2),
        ("quantize_ragged_grad_fp8", (1, 8208), 3, 2),
    ],
)
def test_a_small_buffer_takes_one_launch(
    machine: Machine, function: str, shape: tuple[int, ...], segments: int, launches: int
) -> None:
    x, offsets = randn(*shape), torch.linspace(0, shape[0], segments + 1).long() // 16 * 16
    keywords = {} if "nvfp4" in function else {"dtype": torch.float8_e5m2}
    exact = "grad" not in function
    sample = Sample(function, "", lambda _: ((x, offsets), keywords), exact)
    before = machine.launches
    _check(machine, sample, [(HOPPER, False)])
    assert machine.launches == before + launches


@pytest.mark.parametrize("name", ["quantize_ragged_fp8", "quantize_ragged_nvfp4"])
def test_a_first_segment_that_begins_after_whole_ranges(machine: Machine, name: str) -> None:
    """In the middle of a warp's step."""
    x, offsets = randn(70_000), torch.tensor([61_232, 61_248, 61_248, 70_000])
    keywords: dict[str, Any] = {} if "nvfp4" in name else {"dtype": torch.float8_e4m3fn}
    sample = Sample(name, "gap", lambda _: ((x, offsets), keywords))
    _check(machine, sample, [(device, device % 2 > 0) for device in range(machine.devices)])


def _wrong_offsets(made: random.Random, rows: int, count: int) -> Tensor:
    """Some before the first or after the last row, and all or a few not in order."""
    offsets = [made.randint(-rows // 2, rows * 3 // 2) for _ in range(count + 1)]
    if made.random() < 0.7:
        offsets.sort()
        for _ in range(3):
            offsets[made.randrange(count + 1)] = made.choice((-(2**62), 2**62, rows // 2, rows))
    return torch.tensor(offsets)


@pytest.mark.timeout(300, method="thread")  # a walk that never ends does not let signals through
@pytest.mark.parametrize("name", [name for name in sorted(OPS) if "_ragged_" in name])
def test_offsets_that_do_not_ascend(machine: Machine, name: str) -> None:
    """The results are any, but kernels end, with all threads of a block at its barriers."""
    op, format_ = OPS[name], name.rpartition("_")[2]
    quantize = getattr(reference, f"quantize_ragged_{format_}")
    for seed in range(60):
        made = random.Random(seed)
        rows, cols = made.choice(((600, 1), (9000, 1), (70_000, 1), (2100, 16), (129, 300)))
        count = made.choice((2, 9, 40, 600))
        offsets = _wrong_offsets(made, rows, count)
        sizes = made.choice((None, None, offsets[1:] // 3))
        scales = () if format_ == "mxfp8" else (made.choice((None, torch.ones(count))),)
        dtype = made.choice((torch.bfloat16, torch.float32))
        keywords: dict[str, Any] = {} if format_ == "nvfp4" else {"dtype": torch.float8_e4m3fn}
        x = randn(rows, cols, dtype=dtype)
        args: tuple[Any, ...] = (x, offsets, *scales)
        if "_grad_" in name:
            keywords |= {"with_dbias": made.random() < 0.5}
        elif name.startswith("dequantize_"):
            parts = quantize(x, torch.linspace(0, rows, count + 1).long(), **keywords)
            args = (*parts[: 3 if format_ == "nvfp4" else 2], offsets)
            keywords = {"dtype": dtype}
            if format_ == "nvfp4":
                keywords |= {"numel": rows * cols, "row_size": cols}
        guarded = _guarded(op, args, {**keywords, "sizes": sizes})
        got = {result: parts[-1] for result, parts in guarded.items()}
        machine.use(seed % machine.devices, descending=seed % 2 > 0)
        op._cuda_out(*args, **keywords, sizes=sizes, **got)
        for result, (memory, own, _) in guarded.items():
            assert bool((memory[~own] == POISON).all()), f"{seed}: {result}: written outside of it"


@pytest.mark.parametrize(
    ("shape", "how", "launches"),
    [
        ((1, 7168), {}, 1),
        ((16, 7161), {"scale_layout": "swizzled_128x4", "recipe": "vllm"}, 1),
        ((257, 448), {}, 2),
        ((16, 48), {"block": "16x16"}, 2),
        ((16, 48), {"dim": 0}, 2),
    ],
)
def test_a_small_weight_takes_one_launch(
    machine: Machine, shape: tuple[int, int], how: dict[str, Any], launches: int
) -> None:
    w = randn(*shape)
    sample = Sample("quantize_weight_nvfp4", "", lambda _: ((w,), how))
    before = machine.launches
    _check(machine, sample, [(HOPPER, False)])
    assert machine.launches == before + launches


@pytest.mark.parametrize("cols", [16, 7168, 16384, 16400, 18432, 18448])
def test_the_scale_of_one_row_is_that_of_the_tensor(machine: Machine, cols: int) -> None:
    """In a thread block with one or two blocks of values per thread, or in a cluster."""
    x = randn(1, cols)
    sample = Sample("quantize_fp8", "", lambda _: ((x,), {"dtype": torch.float8_e4m3fn}))
    _check(machine, sample, [(HOPPER, False)])


def test_products_in_tiles_of_two_shapes(machine: Machine) -> None:
    """Two clusters take two of three tiles; the last is split along k in a second launch."""
    for cols, launches in ((192, 1), (1280, 2)):
        args = (
            randn(193, cols, dtype=torch.bfloat16),
            *packed(520, cols, seed=0),
            torch.ones(1) / 1024,
        )
        made: Arguments = (args, {"dtype": torch.float32})
        sample = Sample("nvfp4_linear", f"193x520x{cols}", lambda _, m=made: m, exact=False)
        before = machine.launches
        _check(machine, sample, [(TWO_CLUSTERS, False)])
        assert machine.launches == before + launches


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.choices or op.numbers])
def test_names_and_numbers_are_refused_in_the_plans_words(machine: Machine, name: str) -> None:
    machine.use(0)
    op = OPS[name]
    args, kwargs = SAMPLES[name][0].make("cpu")
    arguments = op._named(args, kwargs)
    results = op.plan(**arguments).results
    buffers = {
        result: poisoned(torch.empty(r.shape, dtype=r.dtype))
        for result, r in zip(op.results, results, strict=True)
    }
    wrong: list[tuple[str, Any]] = [(argument, "other") for argument in op.choices]
    for argument, number in op.numbers.items():
        least = math.nextafter(number.least, -math.inf)
        wrong += [(argument, value) for value in (least, -1e5, 1e300, math.inf, math.nan)]
    for argument, value in wrong:
        changed = {**arguments, argument: value}
        with pytest.raises(ValueError) as plan:
            op.plan(**changed)
        with pytest.raises(RuntimeError) as binding:
            machine.call(op.module, op.function, **changed, **buffers)
        assert str(binding.value) == f"{op.function}: {plan.value}"
    assert all(bool((byte_view(t) == POISON).all()) for t in buffers.values())


def test_dtypes_are_refused_in_the_plans_words(machine: Machine) -> None:
    """No op takes float64, wherever its record has a rule of dtypes."""
    machine.use(0)
    refused = 0
    for name, op in OPS.items():
        args, kwargs = SAMPLES[name][0].make("cpu")
        arguments = op._named(args, kwargs)
        buffers = {
            result: poisoned(torch.empty(r.shape, dtype=r.dtype))
            for result, r in zip(op.results, op.plan(**arguments).results, strict=True)
        }
        kinds = {a.name: str(a.real_type) for a in op.default._schema.arguments}
        for argument, rule in op.accepts.items():
            if isinstance(rule, Number):
                continue
            given, wrong = arguments[argument], torch.float64
            if "Tensor" in kinds[argument]:
                shape = given.shape if isinstance(given, Tensor) else (1,)
                wrong = torch.zeros(shape, dtype=torch.float64)
            changed = {**arguments, argument: wrong}
            with pytest.raises(
                TypeError, match=f"^{argument}: expected .*, got torch.float64"
            ) as plan:
                op.plan(**changed)
            with pytest.raises(RuntimeError) as binding:
                machine.call(op.module, op.function, **changed, **buffers)
            assert str(binding.value) == f"{op.function}: {plan.value}"
            refused += 1
    assert refused > len(OPS)


class _Refusal(NamedTuple):
    """What an op refused: all its arguments, and the buffers where one of these was wrong."""

    op: Op
    arguments: dict[str, Any]
    buffers: Sequence[Tensor] | None
    error: Exception


@contextlib.contextmanager
def _refusals() -> Iterator[list[_Refusal]]:
    """Notes what ops refuse, however they are called."""
    found: list[_Refusal] = []

    def noted(check: Callable[..., Any], arguments: int, buffers: int | None) -> Callable[..., Any]:
        def checked(op: Op, *args: Any) -> Any:
            try:
                return check(op, *args)
            except (TypeError, ValueError) as error:
                if not any(error is refusal.error for refusal in found):
                    own = {name: args[arguments][name] for name in op.names}
                    given = None if buffers is None else (*args, None)[buffers]
                    found.append(_Refusal(op, own, given or None, error))
                raise

        return checked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "_checked", noted(Op._checked, 0, None))
        patch.setattr(Op, "_plan_out", noted(Op._plan_out, 1, 0))
        patch.setattr(Op, "_check_memory", noted(Op._check_memory, 0, 1))
        yield found


def test_bindings_refuse_what_ops_refuse(machine: Machine) -> None:
    """Each call of the tables of errors, in the same words.

    Bindings do not know what makes buffers, and look at shared memory first.
    """
    machine.use(0)
    compared = 0
    for call, error, _ in (*test_errors.CASES.values(), *test_errors_fp8.CASES.values()):
        with _refusals() as found, contextlib.suppress(error):
            call()
        for op, arguments, buffers, refused in found:
            given = [*arguments.values(), *(buffers or ())]
            if any(isinstance(t, Tensor) and t.device.type != "cpu" for t in given):
                continue  # all of the machine's tensors are on one device
            if "require grad" in str(refused):
                continue  # that is PyTorch's
            results = buffers or [torch.zeros(1, dtype=torch.uint8) for _ in op.results]
            with pytest.raises(RuntimeError) as said:
                machine.call(
                    op.module,
                    op.function,
                    **arguments,
                    **dict(zip(op.results, results)),  # noqa: B905
                )
            words = re.sub(r" [\w.]+\(.*\) makes buffers that fit$", "", str(refused))
            words = _of_results(op, words)
            of_binding = str(said.value).removeprefix(f"{op.function}: ")
            assert of_binding == words.removesuffix(".") or "it shares with" in of_binding
            compared += 1
    assert compared > 150


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _of_results(op: Op, text: str) -> str:
    """A message with the schema's names of the buffers."""
    for label, name in zip(op._labels, op.results, strict=True):
        text = re.sub(rf"(?<!\w){re.escape(label)}(?!\w)", name, text)
    return text


def test_numbers_and_buffers_that_the_plans_refuse(machine: Machine) -> None:
    x, e4m3 = randn(4, 32), torch.float8_e4m3fn

    def call(data: Tensor, **keywords: float) -> None:
        scale_inv, amax = torch.empty(1), torch.empty(1)
        parts = {"data": data, "scale_inv": scale_inv, "amax": amax}
        machine.call("quantize_fp8", "quantize_fp8", x, dtype=e4m3, **keywords, **parts)

    machine.use(0)
    data = torch.empty(4, 32, dtype=e4m3)
    for keywords in ({"scale_value": FP8_SCALE_MIN}, {"scale_ub": FP32_TINIEST}):
        call(data, **keywords)
    x_fp4, x_sf = torch.empty(4, 16, dtype=torch.uint8), torch.empty(4, 2, dtype=torch.uint8)
    parts = {"x_fp4": x_fp4, "x_sf": x_sf, "gsa": torch.empty(1)}
    amax_quantize = "fused_amax_quantize", "amax_quantize_nvfp4", x
    machine.call(*amax_quantize, gsa_value=FP32_TINIEST, **parts)
    memory = torch.empty(256, dtype=e4m3)
    call(memory.as_strided((4, 32), (64, 1)))
    for stride in (0, 1, 16, 31):
        with pytest.raises(RuntimeError, match="memory of its own"):
            call(memory.as_strided((4, 32), (stride, 1)))


def _refused(machine: Machine, op: Op, arguments: dict[str, Any], buffers: dict[str, Any]) -> str:
    """What an op and its binding both say of a call; nothing if both accept it."""
    said = []
    for call in (op.out, functools.partial(machine.call, op.module, op.function)):
        try:
            call(**arguments, **buffers)
            said.append("")
        except (ValueError, RuntimeError) as error:
            said.append(str(error).removeprefix(f"{op.function}: "))
    assert _of_results(op, said[0]) == said[1]
    return said[1]


def _neighbors(one: Tensor, other: Tensor, *, meet: bool) -> tuple[Tensor, Tensor]:
    """Contiguous copies in one piece of memory, the second from the end of the first on."""
    sizes = [t.numel() * t.element_size() for t in (one, other)]
    second = (sizes[0] - 1 if meet else sizes[0] + 15) // 16 * 16  # aligned
    memory = torch.zeros(second + max(sizes), dtype=torch.uint8)
    made = []
    for t, first, count in zip((one, other), (0, second), sizes, strict=True):
        part = memory[first : first + count]
        part.copy_(t.contiguous().reshape(-1).view(torch.uint8))
        made.append(part.view(t.dtype).view(t.shape))
    return made[0], made[1]


@pytest.mark.parametrize("name", sorted(OPS))
def test_what_is_written_has_memory_of_its_own(machine: Machine, name: str) -> None:
    """Each result and a residual that is updated, next to every other tensor of the call."""
    op = OPS[name]
    machine.use(0)

    def tensors(sample: Sample) -> int:
        args, kwargs = sample.make("cpu")
        return sum(isinstance(v, Tensor) and v.numel() > 0 for v in (*args, *kwargs.values()))

    args, kwargs = max(SAMPLES[name], key=tensors).make("cpu")
    arguments, buffers = op._named(args, kwargs), poisoned_buffers(op, args, kwargs)
    updated = ["residual"] if "!" in op.arguments else []
    present = {
        key: value
        for key, value in {**arguments, **buffers}.items()
        if isinstance(value, Tensor) and value.numel() > 0
    }
    for one, other in itertools.product([*updated, *buffers], present):
        if one == other or one not in present:
            continue
        for meet in (True, False):
            changed = dict(
                zip((one, other), _neighbors(present[one], present[other], meet=meet), strict=True)
            )
            given = {key: changed.get(key, value) for key, value in arguments.items()}
            into = {key: changed.get(key, value) for key, value in buffers.items()}
            said = _refused(machine, op, given, into)
            assert ("it shares with" in said) == meet
            assert _words(said) >= {one, other} if meet else said == ""


UPDATES = [name for name, op in OPS.items() if "!" in op.arguments]


@pytest.mark.parametrize("name", UPDATES)
def test_a_residual_does_not_overlap_itself_or_x(machine: Machine, name: str) -> None:
    """Refused only if two elements really meet."""
    machine.use(0)
    op = OPS[name]
    wide = randn(5, 130)
    sample = next(s for s in SAMPLES[name] if s.make("cpu")[1]["residual"] is not None)
    args, kwargs = sample.make("cpu")
    x, weight = wide[:4, :64], torch.ones(64)
    others = [t[:1] if isinstance(t, Tensor) else t for t in args[2:]]
    buffers = poisoned_buffers(op, (x, weight, *others), {**kwargs, "residual": None})
    arguments = op._named((x, weight, *others), kwargs)
    for residual, refused in (
        (x, "shares with"),
        (wide[:4, 63:127], "shares with"),
        (wide[:4, 64:128], ""),
        (wide.view(-1)[66:].as_strided((4, 64), (130, 1)), ""),
        (randn(256).as_strided((4, 64), (0, 1)), "strides"),
        (randn(256).as_strided((4, 64), (63, 1)), "strides"),
        (randn(8, 64)[::2], ""),
    ):
        said = _refused(machine, op, {**arguments, "residual": residual}, buffers)
        assert refused in said if refused else said == ""


@each_share
@pytest.mark.parametrize("family", ["samples", "fp8", "groups", "anywhere"])
def test_row_strided_elements(machine: Machine, family: str, rest: bool) -> None:
    """Aligned rows and unaligned ones."""
    samples = ALL_SAMPLES if family == "samples" else FAMILIES[family]()
    for i, sample in _share((sample for sample in samples if sample.op in APART), rest):
        run = (i % machine.devices, i // machine.devices % 2 > 0)
        _check(machine, sample, [run], places=((16, 0), (3, 1)))


@pytest.mark.parametrize(("case", "recipe"), golden.CASES)
def test_golden_vectors(machine: Machine, case: str, recipe: str) -> None:
    name, more, kwargs, _ = golden.RECIPES[recipe]
    op, args = OPS[name], (golden.GOLDEN[f"{case}/x"], *more)
    for device in range(machine.devices):
        machine.use(device, descending=device % 2 > 0)
        buffers = poisoned_buffers(op, args, kwargs)
        op._cuda_out(*args, **kwargs, **buffers)
        golden.assert_equals_golden(case, recipe, tuple(buffers.values()))


@pytest.mark.parametrize(("case", "recipe"), golden_recipes.CASES)
def test_golden_vectors_of_recipes(machine: Machine, case: str, recipe: str) -> None:
    device = len(case) % machine.devices
    machine.use(device, descending=device % 2 > 0)

    def function(name: str) -> golden_recipes.Function:
        def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            buffers = poisoned_buffers(OPS[name], args, kwargs)
            OPS[name]._cuda_out(*args, **kwargs, **buffers)
            return tuple(buffers.values())

        return call

    golden_recipes.assert_equals_golden(case, recipe, function)


@pytest.mark.parametrize(("cuda", "torch_"), [(0, 0), (0, 1), (1, 0)])
def test_the_tensors_device_takes_the_launches(machine: Machine, cuda: int, torch_: int) -> None:
    """Whatever CUDA or PyTorch takes for the current device; nothing is asked of another one."""
    for name, op in OPS.items():
        args, kwargs = _arguments(SAMPLES[name][0])
        buffers = {key: parts[-1] for key, parts in _guarded(op, args, kwargs).items()}
        machine.use(1)
        machine.make_current(cuda, torch_)
        op._cuda_out(*args, **kwargs, **buffers)
        assert machine.current == (cuda, torch_), name


def test_a_launch_that_fails_leaves_no_error_to_others(machine: Machine) -> None:
    machine.refuse(True)
    try:
        for name, op in OPS.items():
            machine.use(0)
            args, kwargs = _arguments(SAMPLES[name][0])
            with pytest.raises(RuntimeError, match="CUDA error"):
                op._cuda_out(*args, **kwargs, **poisoned_buffers(op, args, kwargs))
            assert machine.last_error == 0, name
    finally:
        machine.refuse(False)


def _rows_in_two_dimensions(op: Op) -> Sample | None:
    """A sample of an op that takes such rows at any stride."""
    of_row = 1 + (op.names[0] == "X")
    whole = op.names[0].endswith("_fp4") or "offsets" in op.names  # contiguous tensors alone
    for sample in () if whole else SAMPLES[op.name]:
        x = sample.make("cpu")[0][0]
        if x.dim() == of_row + 2 and x.numel() > 0:
            return sample
    return None


def test_rows_that_32_bits_cannot_count(machine: Machine) -> None:
    """Refused unless they are at one stride: kernels divide a row's number in 32 bits then."""
    refused = 0
    for op in OPS.values():
        sample = _rows_in_two_dimensions(op)
        if sample is None:
            continue
        machine.use(0)
        args, kwargs = sample.make("cpu")
        many = args[0][:2, :1].expand(2, 2**32, *args[0].shape[2:])
        arguments = {**op._named(args, kwargs), op.names[0]: many}
        buffers = {result: torch.zeros(1) for result in op.results}
        with pytest.raises(RuntimeError) as said:
            machine.call(op.module, op.function, **arguments, **buffers)
        words = "expected fewer than 2^32 rows"
        try:
            op.plan(**arguments)
            refused += 1
        except ValueError as error:  # an argument for other rows, which is looked at before
            words = str(error)
        assert words in str(said.value)
    assert refused > 20


def test_functions_that_no_op_calls(machine: Machine, checked: set[str]) -> None:
    module = "fused_amax_quantize"
    machine.use(0)
    for dtype, layout, cols in itertools.product(DTYPES, SCALE_LAYOUTS, (768, 760)):
        # Strided rows.
        fused, gsa = randn(40, 2 * cols + 16, dtype=dtype)[:, :-16], torch.tensor([0.002])
        ways = {"recipe": RECIPES[layout == "linear"], "scale_layout": layout}
        given = reference.quantize_nvfp4_from_gsa(fused, gsa, **ways)
        calls = [("quantize_nvfp4_from_buffer", (fused, gsa), ways, given)]
        for op in ("select", "swiglu"):
            args, how = (fused, cols, 8, gsa), {**ways, "op": op}
            given = reference.deinterleave_quantize_nvfp4_from_gsa(*args, **how)
            calls.append(("deinterleave_quantize_from_buffer", args, how, given))
        if cols == 768:
            # More pieces of work than a persistent grid takes.
            x = randn(529, 528, dtype=dtype)
            given = reference.quantize_nvfp4_from_gsa(x, gsa, **ways)
            calls.append(("quantize_nvfp4_from_buffer", (x, gsa), ways, given))
        for function, args, how, expected in calls:
            out = [poisoned(t) for t in expected]
            machine.call(module, function, *args, **how, x_fp4=out[0], x_sf=out[1])
            for name, a, b in zip(("x_fp4", "x_sf"), out, expected, strict=True):
                _agree(f"{function} {name}", how.get("op") != "swiglu", a, b)
    checked.add("functions")


def test_every_kernel_has_run(machine: Machine, checked: set[str]) -> None:
    own = {"functions", "tiles", "experts in tiles", "long norms"}
    ways = {f"{family} {rest}" for family in FAMILIES for rest in (False, True)}
    if not checked >= {*OPS, *ways, *own}:
        pytest.skip("tells something only after all other tests of this file")
    kernels = machine.kernels()
    ran = {name.split(": ", 1)[1] for name, launched in kernels.items() if launched}
    # A kernel that is no template is in every module that includes its header: one call counts.
    left = sorted(
        name
        for name, launched in kernels.items()
        if not launched and ("<" in name or name.split(": ", 1)[1] not in ran)
    )
    assert not left, f"no case of emulated_cases.py launches {' or '.join(left)}"
