"""The benchmark's plain code has the reference's bits, and its sums of bytes are right."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from harness import timing
from harness.bench import __main__ as command
from harness.bench import host, kernels, loader, peers, plain, report, shapes, sweep
from harness.bench.op import Op, Traffic
from harness.bench.ops import chosen
from harness.bench.ops_nvfp4 import NVFP4_OPS
from rich.console import Console
from torch import Tensor

from jitquant import QuantizedActivation, reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _parts(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    assert isinstance(result, QuantizedActivation)
    parts = (result.x_fp4, result.x_sf, result.gsa, result.inv_rms)
    return [part for part in parts if part is not None]


def _arguments(op: Op, m: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(m + n)
    shaped = [torch.randn(shape, dtype=dtype) for shape in op.shapes(m, n)]
    return [*shaped, *op.extra(n, dtype, torch.device("cpu"))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [op for op in NVFP4_OPS if not op.quantized], ids=lambda op: op.name)
def test_plain_code_has_the_bits_of_the_op(op: Op, dtype: torch.dtype) -> None:
    arguments = _arguments(op, 24, 256, dtype)
    if op.name != "mhc":  # the sign of a sum of zeros depends on where it starts
        arguments[0][3] = 0
    copies = [argument.clone() for argument in arguments]
    for mine, theirs in zip(op.plain(*copies), _parts(op.run(*arguments)), strict=True):
        assert mine.shape == theirs.shape
        if mine.dtype == torch.float32:  # sums of squares in whatever order
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
        else:
            same = mine.view(torch.uint8) == theirs.view(torch.uint8)
            assert (~same).float().mean() <= (1e-3 if "rmsnorm" in op.name + op.call else 0)


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_plain_dequantization_has_the_bits_of_the_reference(granularity: str) -> None:
    parts = plain.quantize(torch.randn(5, 64), granularity)
    codes, scales, gsa = parts
    (expected,) = reference.dequantize_nvfp4(codes.view(torch.float4_e2m1fn_x2), scales, gsa)
    assert torch.equal(plain.dequantize(*parts), expected)


@pytest.mark.parametrize("op", NVFP4_OPS, ids=lambda op: op.name)
def test_traffic_is_that_of_the_tensors(op: Op) -> None:
    m, n = 6, 64
    arguments = _arguments(op, m, n, torch.bfloat16)
    if op.quantized:
        arguments = [reference.quantize_nvfp4(arguments[0])]  # type: ignore[list-item]
        read = sum(part.nbytes for part in arguments[0])
        written = m * n * 2
    else:
        inputs = arguments[: len(op.shapes(m, n))]
        read = sum(argument.nbytes for argument in inputs)
        written = sum(part.nbytes for part in _parts(op.run(*arguments)))
        written += arguments[1].nbytes if op.name == "rmsnorm-residual" else 0
        written -= 4 if op.name.endswith("-given") else 0
    assert op.traffic(m, n, 2) == Traffic(read + written, op.reads * read, written)


CEILINGS = timing.Ceilings(copy=4000.0, read=4400.0, write=3300.0)


def test_floors_are_bytes_over_ceilings() -> None:
    traffic = Traffic(once=3_000_000, read=4_400_000, written=800_000)
    assert traffic.moved == 5_200_000
    assert traffic.floor_us(CEILINGS) == pytest.approx(1.3)
    assert traffic.mixed_floor_us(CEILINGS) == pytest.approx(1.0 + 800 / 3300)


class FakeGpu:
    """A GPU with a clock of its own, which replays at half its speed after 0.1 s of replaying."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured = self.resets = 0
        self.clock_ms = 0.0
        self.replayed_ms: list[float] = []
        self.capturing = False
        for name, fake in {
            "Stream": mock.Mock,
            "Event": self.event,
            "CUDAGraph": lambda: self,
            "current_stream": mock.Mock,
            "stream": lambda _: nullcontext(),
            "graph": self.capture,
            "synchronize": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def event(self, *, enable_timing: bool) -> mock.Mock:
        assert enable_timing
        event = mock.Mock()
        event.record = lambda: setattr(event, "ms", self.clock_ms)
        event.elapsed_time = lambda stop: stop.ms - event.ms
        return event

    @contextmanager
    def capture(self, graph: object, **_: object) -> Iterator[None]:
        assert graph is self
        self.captured += 1
        self.capturing = True
        yield
        self.capturing = False

    def replay(self) -> None:
        assert not self.resets
        self.replayed_ms.append(2.0 if self.clock_ms >= 100 else 1.0)
        self.clock_ms += self.replayed_ms[-1]

    def reset(self) -> None:
        self.resets += 1


def test_both_times_are_of_one_capture_and_the_brief_one_is_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu(monkeypatch)
    calls: list[int] = []
    inputs = [(i,) for i in range(4)]
    times = timing.graph_times(lambda i: calls.append(i) if gpu.capturing else None, inputs)
    assert times == timing.GraphTimes(brief=1e3 / 4, sustained=2e3 / 4)
    assert (gpu.captured, gpu.resets) == (1, 1)
    assert calls == [0, 1, 2, 3]
    assert len(gpu.replayed_ms) == 2 + 3 * 20 + 5 * 50


@pytest.mark.parametrize(
    ("time_us", "replays", "us"),
    [
        (timing.brief_us, 3 * 20, 1e3 / 2),
        (timing.graph_us, 5 * 50, 2e3 / 2),
        (partial(timing.graph_us, stage=timing.Stage(0.01, 2)), 2 * 10, 1e3 / 2),
    ],
)
def test_one_time_is_of_as_many_replays_as_its_stage_has(
    monkeypatch: pytest.MonkeyPatch, time_us: Callable[..., float], replays: int, us: float
) -> None:
    gpu = FakeGpu(monkeypatch)
    assert time_us(lambda _: None, [(1,), (2,)]) == us
    assert (gpu.captured, gpu.resets, len(gpu.replayed_ms)) == (1, 1, 2 + replays)


@pytest.mark.usefixtures("fixed_times")
def test_a_row_has_its_floors() -> None:
    (op,) = chosen("quantize-tensor")
    cpu = torch.device("cpu")
    row = kernels.measure(op, 16, 256, torch.bfloat16, cpu, CEILINGS, op.plain, {})
    read, written = 2 * 16 * 256 * 2, 16 * 256 * 9 // 16 + 4
    assert (row.error, row.us, row.launches) == ("", 10.0, 2)
    assert (row.note, row.sustained_us, row.plain_us) == ("", 12.0, 30.0)
    assert row.floor_us == pytest.approx((read + written) / 4000e3)
    assert row.of_floor == pytest.approx((read + written) / 4000e3 / 10)
    assert row.sustained_of_floor == pytest.approx((read + written) / 4000e3 / 12)
    assert row.of_floor == pytest.approx(row.of_copy)
    assert row.of_mixed == pytest.approx((read / 4400e3 + written / 3300e3) / 10)


@pytest.mark.usefixtures("fixed_times")
def test_the_file_and_the_table_have_both_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("jitquant.warmup", lambda *_: None)
    monkeypatch.setattr(timing, "measure_ceilings", lambda _: CEILINGS)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "fake")
    monkeypatch.setattr(report, "picture", lambda *_: False)
    cpu = torch.device("cpu")
    command.measure_kernels(cpu, [16], 256, "bfloat16", "select", False, 9.0, None, tmp_path)
    record = json.loads((tmp_path / "kernels.json").read_text())
    assert (record["brief_seconds"], record["brief_repeats"]) == (0.02, 3)
    assert (record["sustained_seconds"], record["sustained_repeats"]) == (0.05, 5)
    (row,) = record["rows"]
    assert (row["error"], row["us"], row["sustained_us"]) == ("", 10.0, 12.0)
    assert row["sustained_of_floor"] == pytest.approx(row["floor_us"] / 12)
    printed = capsys.readouterr().out
    assert "3 x 0.02 s" in printed
    assert "5 x 0.05 s" in printed
    assert any(line.split()[:3] == ["16", "10.00", "12.00"] for line in printed.splitlines())


def test_the_kernel_table_is_not_wider_than_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    (op,) = chosen("mhc")
    row = kernels.Measurement("mhc", 65536, 7168)
    row.us = row.sustained_us = row.plain_us = 12345.67
    row.floor_us, row.gb_per_s, row.of_floor, row.of_mixed = 9876.54, 4321.0, 1.0, 1.0
    row.launches, row.host_us, row.peers = 2, 123.4, {"flashinfer": 12345.67}
    row.behind_us, row.peers_behind = 12.34, {"flashinfer": 12.34}
    caption = peers.absent(dict.fromkeys(peers.LIBRARIES, peers.ABSENT))
    Console(width=200).print(report.kernel_table(op, [row], caption))
    lines = capsys.readouterr().out.splitlines()
    assert "sustained" in lines[1]
    assert "12345.67 flashinfer" in lines[-2]
    assert lines[-2].rstrip().endswith("12.34 flashinfer")
    assert lines[-1].rstrip() == caption
    assert max(len(line.rstrip()) for line in lines) <= 120


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("n", [64, 67, 70])
def test_the_sweep_counts_the_bytes_of_the_tensors(n: int, layout: str) -> None:
    case = sweep.Case("", 20, n, torch.float16, pad=16, layout=layout)
    xs = [torch.randn(20, n + 16).half()[:, :n] for _ in range(2)]
    values = 20 * n * 2
    for op in sweep.OPS:
        run, traffic, inputs = sweep.call(op, case, xs)
        assert len(inputs) == 2
        result = run(*inputs[0])
        parts = _parts(inputs[0][0] if op == "dequantize" else result)
        packed = sum(part.nbytes for part in parts) - (4 if op == "given" else 0)
        if op == "dequantize":
            assert (result.dtype, result.nbytes) == (torch.float16, values)
            assert traffic == Traffic(packed + values, packed, values)
        else:
            assert (result.scale_layout, result.shape) == (layout, (20, n))
            assert traffic == Traffic(values + packed, (1 + (op == "tensor")) * values, packed)


def test_the_sweep_names_its_worst_point(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = sweep.Case("usual", 16, 64)
    fp16 = sweep.Case("fp16", 16, 64, torch.float16)
    short = sweep.Case("N", 32, 32)
    slow = {("row", 32): 9.0, ("given", 64): 2.0}

    def timed(fn: object, inputs: list[tuple[Tensor]], **_: object) -> float:
        op = sweep.OPS[counter.pop(0) % len(sweep.OPS)]
        shape = inputs[0][0].shape
        if op == "dequantize" and shape[-1] == 32:
            raise RuntimeError("no such luck")
        return slow.get((op, shape[-1]), 1.0)

    counter = list(range(15))
    monkeypatch.setattr(sweep, "CASES", (usual, fp16, short))
    monkeypatch.setattr(timing, "sets_needed", lambda _: 2)
    monkeypatch.setattr(timing, "brief_us", timed)
    points = [p for part in sweep.run(torch.device("cpu"), CEILINGS) for p in part]
    assert [point.op for point in points] == list(sweep.OPS) * 3
    (failed,) = [point for point in points if point.error]
    assert (failed.op, failed.case, failed.us) == ("dequantize", "32 x 32", None)
    row = sweep.worst(points, "row")
    assert row is not None
    assert (row.case, row.per_value) == ("32 x 32", 9.0)
    assert sweep.worst(points) == row
    lines = report.sweep_summary(points)
    assert lines[-1].startswith("Worst point: row at 32 x 32: ")
    assert "9.00 times" in lines[-1]
    assert any(line.startswith("fp16 / bf16: tensor 1.000, given 1.000") for line in lines)
    assert report.sweep_table(points).row_count == 3


def test_the_cases_of_the_sweep_are_of_equal_work() -> None:
    names = [case.name for case in sweep.CASES]
    assert len(set(names)) == len(names)
    assert sweep.CASES[0].name == "8192 x 7168"
    assert {384, 7168, 7170, 7171, 7176, 28672} <= {case.n for case in sweep.CASES}
    for case in sweep.CASES:
        assert case.m * case.n / (sweep.M * sweep.N) == pytest.approx(1, abs=0.25)


def test_shapes_run_and_count_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases as they are, of fewer rows and columns."""
    timed = []

    def brief(fn: Callable[..., object], inputs: list[tuple[Tensor]], _: timing.Stage) -> float:
        timed.append(fn)
        return 2.0

    monkeypatch.setattr(timing, "brief_us", brief)
    every = list(shapes.cases())
    names = [(case.op, case.m, case.n) for case in every]
    assert len(set(names)) == len(names)
    small = {case.op: dataclasses.replace(case, m=16, n=256) for case in every}
    pool = torch.randn(2**16).bfloat16()
    for case in small.values():
        made = dataclasses.replace(case, plain=None)
        if case.op.startswith("gradient"):
            made = dataclasses.replace(made, extra=lambda *_: (torch.tensor([0, 16]),))
        point = shapes.measure(made, pool, CEILINGS)
        assert not point.error, f"{case.op}: {point.error}"
        assert point.floor_us is not None
        values = point.floor_us * CEILINGS.copy * 1e3 / (16 * 256)
        most = 2 * case.inputs * (1 + case.wide) * case.reads + 2 * case.updates
        assert most + 0.5 < values < most + 2.4, case.op
    assert len(timed) == len(small)


def test_gradients_have_segments_of_all_rows() -> None:
    """Offsets of a matrix count rows, and what lies past the last row is cut off without a word."""
    segments = []
    for case in shapes.cases():
        if case.op.startswith("gradient"):
            (offsets,) = case.extra(case.n, torch.device("cpu"))
            assert (int(offsets[0]), int(offsets[-1])) == (0, case.m), case.op
            assert bool((offsets.diff() == case.m // (len(offsets) - 1)).all()), case.op
            segments.append((case.op, len(offsets) - 1))
    assert set(segments) == {("gradient of 8", 8), ("gradient of 64", 64)}


def test_a_roofline_is_drawn_for_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ops = list(chosen("quantize-tensor,mhc,dequantize"))
    failed = kernels.Measurement("mhc", 1, 256, error="no memory")
    rows = [failed]
    for op in ops:
        for m in (1, 64, 4096):
            traffic = op.traffic(m, 256, 2)
            us = 2 + 2 * traffic.floor_us(CEILINGS)
            rate = traffic.moved / (us * 1e3)
            row = kernels.Measurement(op.name, m, 256, us, gb_per_s=rate)
            row.of_copy = rate / CEILINGS.copy
            row.of_mixed = traffic.mixed_floor_us(CEILINGS) / us
            row.plain_us = None if op.name == "mhc" else 3 * us
            rows.append(row)
    path = tmp_path / "kernels.png"
    assert not report.picture(ops, [failed], CEILINGS, "nothing", path)
    assert not path.exists()
    assert report.picture(ops, rows, CEILINGS, "three", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    one = [row for row in rows if row.op == "dequantize"]
    assert report.picture(ops, one[:1], CEILINGS, "a panel, a point", path)


def test_inputs_rotate_through_more_than_the_cache() -> None:
    assert timing.sets_needed(2 * 7168) * 2 * 7168 > 300e6
    assert timing.sets_needed(10**9) == 2
    assert timing.sets_needed(1) == timing.MAX_SETS


def test_ops_are_chosen_by_name() -> None:
    assert [op.name for op in chosen("mhc,select")] == ["mhc", "select"]
    assert len(list(chosen("all"))) == len(NVFP4_OPS)
    with pytest.raises(ValueError, match="quantize-row"):
        list(chosen("nothing"))


def test_the_programs_of_the_loader_table_are_python() -> None:
    programs = {name: text for name, text in vars(loader).items() if "print(" in str(text)}
    assert len(programs) == 18
    for name, text in programs.items():
        compile(textwrap.dedent(text), name, "exec")


def test_the_calls_of_the_host_table_take_both_ways() -> None:
    cpu = torch.device("cpu")
    for call in (*host.calls(1, 64, cpu), *host.calls_8_bit(1, 64, cpu)):
        made, written = call.new(), call.into()
        assert type(made) is type(written), call.name
        assert call.into() is written, call.name
