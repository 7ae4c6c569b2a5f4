"""Other libraries beside the ops: fakes of them are called, timed and reported."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from harness import timing
from harness.bench import __main__ as command
from harness.bench import kernels, peers, peers_fp8, peers_nvfp4, report, summary
from harness.bench import peer as shared
from harness.bench.ops import chosen
from torch import Tensor

CPU = torch.device("cpu")
KNOWN = [
    (op, library, peer) for op, known in peers.PEERS.items() for library, peer in known.items()
]


@pytest.mark.usefixtures("fixed_times")
@pytest.mark.parametrize(
    ("name", "library", "peer"), KNOWN, ids=[f"{op}-{library}" for op, library, _ in KNOWN]
)
def test_a_peer_hands_the_inputs_of_its_op_to_its_library(
    monkeypatch: pytest.MonkeyPatch, name: str, library: str, peer: peers.Peer
) -> None:
    fake, asked = mock.MagicMock(), []
    fake.tensor_to_scale.return_value = torch.ones(1)

    def module(name: str) -> Any:
        asked.append(name)
        return fake

    for place in (shared, peers_fp8, peers_nvfp4):
        monkeypatch.setattr(place, "module", module)
    monkeypatch.setattr(peers_fp8, "compiled", lambda fn: fn)
    (op,) = chosen(name)
    inputs = op.inputs(8, 256, torch.bfloat16, CPU)[0]
    with mock.patch.object(torch, "ops", fake):
        peer(*inputs)
    # vLLM's ops are in torch.ops; what it has in Python is asked for by name.
    assert asked or library == "vllm"
    assert {text.split(".")[0] for text in asked} <= {peers.LIBRARIES[library]}
    given = [a for call in fake.mock_calls for a in (*call.args, *call.kwargs.values())]
    pointers = {a.data_ptr() for a in given if isinstance(a, Tensor)}
    for tensor in inputs:
        factor = tensor.shape == (1,) and tensor.data_ptr() not in pointers
        assert (shared.inverse(tensor) if factor else tensor).data_ptr() in pointers


def test_a_factor_is_inverted_once() -> None:
    factor = torch.full((1,), 4.0)
    assert shared.inverse(factor) is shared.inverse(factor)
    assert shared.inverse(factor).item() == 0.25
    assert shared.inverse(torch.full((1,), 8.0)).item() == 0.125


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Tensor]:
    """A vLLM that keeps what it is given, an FBGEMM that raises, a torchao that does not load."""
    given: list[Tensor] = []

    def fp8_row(x: Tensor, *_: object) -> None:
        given.append(x)

    def triton_quantize_fp8_row(x: Tensor) -> None:
        raise RuntimeError("no such luck\nand more")

    modules = {
        "fbgemm_gpu": {},
        "fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm": {
            "triton_quantize_fp8_row": triton_quantize_fp8_row
        },
    }
    for name, parts in modules.items():
        fake = ModuleType(name)
        vars(fake).update(parts)
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(peers.peers_vllm, "load", lambda _: "a library")
    monkeypatch.setitem(peers_fp8.FP8_PEERS["fp8-row"], "vllm", fp8_row)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as if not installed
    monkeypatch.delitem(sys.modules, "torchao", raising=False)
    package = tmp_path / "torchao"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('no [lib].so')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return given


@pytest.fixture
def fake_gpu(fixed_times: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command needs of a GPU; a peer is called with each set of inputs."""

    def brief_us(fn: peers.Peer, inputs: list[tuple[Any, ...]]) -> float:
        for arguments in inputs:
            fn(*arguments)
        return 7.5

    monkeypatch.setattr(timing, "brief_us", brief_us)
    monkeypatch.setattr("jitquant.warmup", lambda *_: None)
    monkeypatch.setattr(timing, "measure_ceilings", lambda _: timing.Ceilings(4e3, 4e3, 4e3))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "fake")
    monkeypatch.setattr(report, "picture", lambda *_: False)


@pytest.mark.usefixtures("fake_gpu")
def test_what_was_measured_is_kept_if_a_peer_ends_the_process(
    libraries: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def ends(*_: object) -> None:
        raise SystemExit

    def measure() -> None:
        command.measure_kernels(
            CPU, [16], 256, "bfloat16", "fp8-row,fp8-tensor", False, 9.0, None, tmp_path
        )

    whole, part = tmp_path / "kernels.json", tmp_path / "kernels.partial.json"
    measure()
    assert not part.exists()
    assert capsys.readouterr().out.count("wrote ") == 1
    before = whole.read_text()
    monkeypatch.setitem(peers_fp8.FP8_PEERS["fp8-tensor"], "vllm", ends)
    with pytest.raises(SystemExit):
        measure()
    assert whole.read_text() == before
    assert "wrote " not in capsys.readouterr().out
    (row,) = json.loads(part.read_text())["rows"]
    assert (row["op"], row["us"]) == ("fp8-row", 10.0)


@pytest.mark.usefixtures("fake_gpu")
def test_the_file_and_the_table_have_the_peers(
    libraries: list[Tensor], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = "fp8-row,fp8-tensor-given"
    name = "kernels-fp8-peers"
    command.measure_kernels(CPU, [16], 256, "bfloat16", names, False, 9.0, None, tmp_path, name)

    record = json.loads((tmp_path / f"{name}.json").read_text())
    section = summary.section_of(name, record)
    assert section is not None
    assert section["rows"][0]["peer"] == section["rows"][0]["peer_behind"] == ["vllm"]
    assert record["peers"] == {
        "vllm": "a library",
        "flashinfer": "not importable",
        "torchao": "not importable: OSError: no [lib].so",
        "fbgemm": "unknown",
    }
    row, without = record["rows"]
    nothing = dict.fromkeys(peers.LIBRARIES)
    assert (row["error"], row["us"]) == ("", 10.0)
    assert row["peers"] == {**nothing, "vllm": 7.5}
    assert (row["behind_us"], row["peers_behind"]) == (8.0, {"vllm": 8.0})
    assert row["peer_errors"] == {"fbgemm": "RuntimeError: no such luck"}
    assert (without["peers"], without["peer_errors"]) == (nothing, {})
    # Once before the clock runs, then each set of inputs.
    first, *timed = (x.data_ptr() for x in libraries)
    assert len(timed) == len(set(timed)) == 2
    assert first == timed[0]

    printed = capsys.readouterr().out
    found = (
        "vllm a library, flashinfer not importable, torchao not importable: OSError: no [lib].so"
    )
    assert f"Libraries: {found}" in printed.replace("\n", " ")
    assert sum("7.50 vllm" in line for line in printed.splitlines()) == 1
    assert sum(line.rstrip().endswith("8.00 vllm") for line in printed.splitlines()) == 1
    text = "not importable: flashinfer, torchao (OSError: no [lib].so)."
    assert printed.count(f"Columns are empty, as these are {text}") == 2
    assert "fbgemm: RuntimeError: no such luck" in printed


def test_nothing_is_said_where_all_are_there() -> None:
    assert peers.absent(dict.fromkeys(peers.LIBRARIES, "1.0")) == ""


def test_the_best_peer_is_the_fastest() -> None:
    row = kernels.Measurement("cast", 1, 256, peers={"vllm": 3.0, "torchao": 2.0, "fbgemm": None})
    assert row.best_peer == (2.0, "torchao")
    row.peers = {"vllm": None}
    assert row.best_peer is None


def test_a_call_behind_a_plain_kernel_has_that_kernels_time_taken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([1.25, 4.0])
    calls: list[Any] = []

    def replayed(fn: Any, inputs: list[tuple[Any, ...]], *_: timing.Stage) -> list[float]:
        fn(*inputs[0])
        return [next(times)]

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda n, device: zeros(n))
    monkeypatch.setattr(timing, "_replayed_us", replayed)
    with mock.patch.object(torch, "add", wraps=torch.add) as add:
        assert timing.behind_us(calls.append, [("x",)]) == 2.75
        assert add.call_count == 2
    assert calls == ["x"]


def test_the_version_of_vllm_is_of_its_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.ops, "load_library", lambda _: None)
    library = tmp_path / "vllm" / "of_vllm.so"
    assert peers.versions(library)["vllm"] == "of_vllm.so"
    (tmp_path / "vllm-1.2.3.dist-info").mkdir()
    assert peers.versions(library)["vllm"] == "1.2.3"


def test_vllm_that_is_not_there_is_named() -> None:
    if not importlib.util.find_spec("vllm"):
        assert peers.versions()["vllm"] == peers.ABSENT
    assert peers.versions(Path("none.so"))["vllm"].startswith(f"{peers.ABSENT}: OSError: ")
