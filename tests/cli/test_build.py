"""``jitquant build``, ``bundle`` and ``explain``."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from loader.toys import PATIENCE_SECONDS, entries, litter, wait_for, write_plain

import jitquant

from .conftest import Built, Run

ROOT = Path(jitquant.__file__).resolve().parents[1]


def test_build_and_build_again(run: Run, tmp_path: Path) -> None:
    source = write_plain(tmp_path / "source", stem="one")
    other = write_plain(tmp_path / "source", stem="two")
    done = run("build", source, other, "--jobs", "2", "--json")
    assert done.code == 0
    assert [(r["name"], r["state"], r["error"]) for r in done.json] == [
        ("one", "built", None),
        ("two", "built", None),
    ]
    assert all(Path(r["library"]).is_file() for r in done.json)
    assert len(entries(tmp_path / "cache")) == 2
    shown = run("build", source)
    assert shown.err == "one: in the cache already\n"
    assert shown.out == ""


def test_one_that_fails_does_not_stop_the_others(run: Run, tmp_path: Path) -> None:
    source = write_plain(tmp_path / "source", stem="good")
    bad = tmp_path / "bad.cpp"
    bad.write_text("int f( {\n")
    done = run("build", bad, source)
    assert done.code == 1
    assert "good: built in " in done.err
    assert "building 'bad' failed: g++ bad.cpp" in done.err
    assert f"{bad}:1: error:" in done.err
    report = run("build", bad, source, "--json").json
    assert [r["state"] for r in report] == ["failed", "hit"]


def test_wrong_names_and_numbers(run: Run) -> None:
    assert "Near names: amax_gsa" in run("build", "amax_gs").err
    assert run("build", "--jobs", "0").code == 2
    done = run("build", "amax_gsa", "--arch", "75")
    assert done.code == 1
    assert "architecture '75' is older than 8.0" in done.err


def test_two_modules_of_one_name_are_refused(run: Run, tmp_path: Path) -> None:
    one = write_plain(tmp_path / "a", stem="same")
    other = write_plain(tmp_path / "b", stem="same")
    assert "are named 'same'" in run("build", one, other).err
    assert run("build", one, one).code == 0


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # nobody has its other end
        return b""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_the_compilers_at_once(tmp_path: Path, number: signal.Signals) -> None:
    """And the terminal is as it was."""
    compiler = tmp_path / "slow++"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in "-c "*) echo $$ > {tmp_path}/pid; exec sleep 3000;; esac\n'
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    source = write_plain(tmp_path / "source")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JITQUANT_CACHE_DIR": str(cache),
        "CXX": str(compiler),
        "TERM": "xterm",
    }
    said: list[bytes] = []
    command = [sys.executable, "-m", "jitquant", "build", str(source)]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=environment, stderr=theirs) as process:
        os.close(theirs)
        shown = threading.Thread(target=lambda: said.extend(iter(lambda: _read(ours), b"")))
        shown.start()
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
        compiling = int((tmp_path / "pid").read_text())
        process.send_signal(number)
        code = process.wait(timeout=PATIENCE_SECONDS)
        shown.join()
    os.close(ours)
    assert code == (130 if number == signal.SIGINT else 128 + number)
    written = b"".join(said)
    assert written.rindex(b"\x1b[?25h") > written.rindex(b"\x1b[?25l")  # the cursor is shown again
    with pytest.raises(ProcessLookupError):
        os.kill(compiling, 0)
    assert litter(cache) == []


def test_a_kernel_for_several_architectures_is_a_hit_once_built(run: Run, cached: Built) -> None:
    (report,) = run("build", cached.source, "--arch", "100a,90a", "--json").json
    assert (report["state"], report["archs"]) == ("hit", ["90a", "100a"])


def test_progress_is_shown_on_a_terminal(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "source")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JITQUANT_CACHE_DIR": str(tmp_path / "cache"),
        "TERM": "xterm",
        "COLUMNS": "120",
    }
    command = f"{sys.executable} -m jitquant build {source}"
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 and "script" in done.stderr:
        pytest.skip("there is no script(1) to make a terminal")
    assert "plain" in done.stdout
    assert "built in" in done.stdout
    assert "━" in done.stdout


def test_bundle_and_its_use(
    run: Run, cached: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "bundle"
    done = run("bundle", cached.source, "-o", place)
    assert done.code == 0
    assert f"JITQUANT_BUNDLES={place}" in done.out
    manifest = json.loads((place / "manifest.json").read_text())
    assert [(b["name"], b["archs"]) for b in manifest["builds"]] == [("toy", ["90a", "100a"])]
    again = run("bundle", cached.source, "-o", place)
    assert again.code == 1
    assert again.err == (
        f"error: bundle: {place} already exists. Remove it, or give another directory.\n"
    )
    refused = run("bundle", tmp_path / "not_looked_at.cu", "-o", place / "manifest.json" / "below")
    assert refused.err.startswith(f"error: bundle: {place}/manifest.json/below cannot be made (")
    monkeypatch.setenv("JITQUANT_BUNDLES", str(place))
    monkeypatch.setenv("JITQUANT_CUDA_ARCHS", "100a")
    found = run("explain", cached.source, "--json").json
    assert (found["state"], found["archs"]) == ("bundle", ["100a"])
    assert found["directory"].startswith(str(place))


def test_bundle_of_what_does_not_compile_is_none(run: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.cpp"
    bad.write_text("int f( {\n")
    done = run("bundle", bad, "-o", tmp_path / "bundle")
    assert done.code == 1
    assert "building 'bad' failed" in done.err
    assert not (tmp_path / "bundle").exists()


def test_explain(run: Run, cached: Built) -> None:
    shown = run("explain", cached.source)
    assert shown.out.startswith("toy: in the cache: it would be loaded\n")
    assert "this build took" in shown.out
    assert "nvcc toy.cu" in shown.out
    cached.source.with_suffix(".cuh").write_text("#define FACTOR 4\n")
    shown = run("explain", cached.source)
    assert shown.out.startswith("toy: it would be built: src0/toy.cuh changed\n")
    assert "header src0/toy.cuh: " in shown.out
    found = run("explain", "toy", "--arch", "80", "--json").json
    assert found["state"] == "miss"
    assert "architectures" in [change["kind"] for change in found["changes"]]
    assert run("explain", "../../x").code == 1


def test_a_wrong_architecture_is_said_once(run: Run) -> None:
    done = run("build", "--arch", "12")
    assert done.code == 1
    assert done.err.count("is older than 8.0") == 1
