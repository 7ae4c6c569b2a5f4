"""Freezing, capture, warmup: what a loader does when it must not build, or should have."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quick import in_quick

import jitquant.loader
from jitquant.loader import (
    CaptureError,
    CompileError,
    FrozenError,
    Loader,
    NoBuildError,
    UnsupportedArchError,
)
from jitquant.loader.request.plan import Request

from .conftest import Toy
from .toys import ROOT, entries, new_loader, write_factor, write_plain, write_toy


def test_frozen_loader_serves_what_was_built_and_builds_nothing(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    loader.freeze()
    module = loader.get("plain", [source])  # not loaded, but in the cache
    write_factor(source.with_suffix(".h"), 4)
    assert loader.get("plain", [source]) is module
    with pytest.raises(FrozenError, match="module 'other' would have to be built") as caught:
        loader.get("other", [source])
    start = inspect.getsourcelines(test_frozen_loader_serves_what_was_built_and_builds_nothing)[1]
    named = str(caught.value).split("Asked for at ")[1].split(". To build")[0]
    file, number = named.rsplit(":", 1)
    assert Path(file).name == "test_state.py"
    assert start < int(number) < start + 20
    assert """'import jitquant; jitquant.get_cuda_module("other", ["/""" in str(caught.value)
    source.unlink()
    assert loader.get("plain", [source]) is module
    loader.unfreeze()
    with pytest.raises(FileNotFoundError):
        loader.get("plain", [source])


def test_frozen_loader_builds_what_is_new_if_told_so(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    module = loader.get("plain", [source])
    loader.freeze(build=True)
    write_factor(source.with_suffix(".h"), 4)
    assert loader.get("plain", [source]) is module
    assert loader.get("other", [source]).library.factor() == 4


def test_no_build_takes_what_the_cache_has_and_names_the_command_otherwise(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = plain.copy(tmp_path)
    monkeypatch.setenv("JITQUANT_NO_BUILD", "1")
    loader = new_loader(cache)
    assert loader.get("plain", [source]).library.factor() == 3
    write_factor(source.with_suffix(".h"), 4)
    with pytest.raises(NoBuildError) as caught:
        loader.get("plain", [source])
    assert str(caught.value).startswith(
        "module 'plain' would have to be built, which JITQUANT_NO_BUILD=1 forbids: neither a "
        "bundle nor the cache has it. To build it: python -c 'import jitquant; "
        f'jitquant.get_cuda_module("plain", ["{source}"])\''
    )
    with pytest.raises(NoBuildError):
        loader.ensure(Request("plain", (source,)))
    assert len(entries(cache)) == 1
    monkeypatch.setenv("JITQUANT_NO_BUILD", "0")
    assert loader.get("plain", [source]).library.factor() == 4


def test_the_command_for_a_kernel_of_the_project_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITQUANT_NO_BUILD", "1")
    with pytest.raises(NoBuildError, match=r"To build it: jitquant build amax_gsa --arch 90a$"):
        new_loader(tmp_path / "cache").get("amax_gsa", ["amax_gsa.cu"], archs="90a")


@pytest.mark.parametrize("flags", in_quick(1, [("-DEXTRA=1",), ()]))
@pytest.mark.slow
def test_the_command_of_a_refused_build_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    source = write_plain(tmp_path / "a 'b'")
    loader = new_loader(tmp_path / "cache")
    loader.get("plain", [source], cxx_flags=["-DOTHER=1"])  # the last build of this file
    monkeypatch.setenv("JITQUANT_NO_BUILD", "1")
    with pytest.raises(NoBuildError) as caught:
        loader.get("plain", [source], cxx_flags=flags)
    command = str(caught.value).partition("To build it: ")[2].splitlines()[0]
    assert command.startswith("python -c ")
    command = sys.executable + command.removeprefix("python")
    environment = {
        **os.environ,
        "JITQUANT_CACHE_DIR": str(tmp_path / "cache"),
        "JITQUANT_NO_BUILD": "0",
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run(command, shell=True, check=True, cwd="/", env=environment)
    assert loader.get("plain", [source], cxx_flags=flags).library.factor() == 3


def test_no_build_without_a_compiler(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = plain.copy(tmp_path)
    monkeypatch.setenv("JITQUANT_NO_BUILD", "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoBuildError, match=r"no C\+\+ compiler.*\. To build it: python -c"):
        new_loader(cache).get("plain", [source])


def test_capture(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    capturing = False
    loader = new_loader(cache, capturing=lambda: capturing)
    capturing = True
    # Even a build that is in the cache: loading it must not happen within a capture either.
    with pytest.raises(CaptureError, match=r"Call jitquant\.warmup\('plain'\)"):
        loader.get("plain", [source])
    with pytest.raises(CaptureError, match=r"warmup\('plain'\): a CUDA graph is being captured"):
        loader.warmup("plain")
    capturing = False
    (module,) = loader.warmup("plain").values()
    capturing = True
    assert loader.get("plain", [source]) is module
    source.touch()
    assert loader.get("plain", [source]) is module
    write_factor(source.with_suffix(".h"), 4)
    with pytest.raises(CaptureError, match=r"out of date \(src0/plain\.h changed\)"):
        loader.get("plain", [source])
    capturing = False
    assert loader.get("plain", [source]).library.factor() == 4


def test_looking_for_a_capture_does_not_initialize_cuda() -> None:
    from jitquant.loader.core import capturing_now

    before = torch.cuda.is_initialized()
    assert capturing_now() is False
    assert torch.cuda.is_initialized() == before


def kernels(directory: Path, *names: str) -> Path:
    """A directory like kernels_cu with toys of these names."""
    for name in names:
        write_toy(directory, stem=name)
    return directory


@pytest.mark.slow
def test_warmup_builds_everything_side_by_side(
    tmp_path: Path, nvcc: None, capfd: pytest.CaptureFixture[str]
) -> None:
    loader = new_loader(tmp_path / "cache", kernels_dir=kernels(tmp_path / "k", "aa", "bb"))
    modules = loader.warmup()
    assert sorted(modules) == ["aa", "bb"]
    assert torch.equal(modules["bb"].scale(torch.ones(1), 1.0), torch.tensor([3.0]))
    said = capfd.readouterr().err
    # Both started before one was done.
    assert said.index("building bb") < said.index("built aa")
    assert loader.get("aa", ["aa.cu"]) is modules["aa"]
    loader.warmup("aa")
    assert capfd.readouterr().err == ""
    assert len(entries(tmp_path / "cache")) == 2


def test_warmup_of_unknown_names(tmp_path: Path) -> None:
    loader = new_loader(tmp_path / "cache", kernels_dir=kernels(tmp_path / "k", "amax_gsa"))
    with pytest.raises(ValueError, match=r"Near names: amax_gsa\."):
        loader.warmup("amax_gas")
    with pytest.raises(TypeError, match="give names of modules"):
        loader.warmup(["amax_gsa"])  # type: ignore[arg-type]


def test_warmup_finishes_the_others_and_raises_the_first_error(tmp_path: Path) -> None:
    loader = new_loader(tmp_path / "cache")
    good = write_plain(tmp_path / "good")
    bad = write_plain(tmp_path / "bad", stem="bad")
    bad.write_text("no C++\n")
    with pytest.raises(CompileError):
        loader.get("bad", [bad])
    module = loader.get("plain", [good])
    with pytest.raises(CompileError, match="building 'bad' failed"):
        loader.warmup("bad", "plain")
    assert loader.get("plain", [good]) is module


def test_resident_symbol_is_called_for_each_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import nullcontext

    from jitquant.loader import LoaderError

    source = tmp_path / "plain.cpp"
    source.write_text(
        "static int calls = 0;\n"
        'extern "C" int jitquant_make_resident() { return ++calls == 3 ? 209 : 0; }\n'
        'extern "C" int count() { return calls; }\n'
    )
    loader = new_loader(tmp_path / "cache")
    module = loader.get("plain", [source])
    loader.warmup("plain")
    assert module.library.count() == 0 or torch.cuda.is_available()

    class Stream:
        def synchronize(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    loader.warmup("plain", devices=[0, 1])
    assert module.library.count() >= 2
    with pytest.raises(LoaderError, match=r"CUDA error 209.*the device is sm_90"):
        loader.warmup("plain")


def test_module_level_functions_share_one_loader(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = plain.copy(tmp_path)
    monkeypatch.setenv("JITQUANT_CACHE_DIR", str(cache))
    module = jitquant.loader.get_cuda_module("plain", [source])
    assert jitquant.loader.warmup("plain") == {"plain": module}
    jitquant.loader.freeze()
    try:
        assert jitquant.loader.get_cuda_module("plain", [source]) is module
    finally:
        jitquant.loader.unfreeze()


def test_architectures_follow_the_environment(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = toy.copy(tmp_path)
    loader: Loader = new_loader(cache)
    module = loader.get("toy", [source])
    monkeypatch.setenv("JITQUANT_CUDA_ARCHS", "7.0")
    with pytest.raises(UnsupportedArchError):
        loader.get("toy", [source])
    monkeypatch.setenv("JITQUANT_CUDA_ARCHS", "sm_90a")
    assert loader.get("toy", [source]) is module


def test_quiet(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("JITQUANT_QUIET", "1")
    with caplog.at_level("INFO", logger="jitquant.loader"):
        new_loader(tmp_path / "cache").get("plain", [write_plain(tmp_path / "source")])
    assert capfd.readouterr().err == ""
    assert "building plain" in caplog.text


def test_heartbeat(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from jitquant.loader import report

    monkeypatch.setattr(report, "HEARTBEAT_SECONDS", 0.0)
    report.Heartbeat(report.Reporter(), "toy").tick(["nvcc toy.cu", "g++ toy.cpp"])
    assert "still building toy (0 s: nvcc toy.cu, g++ toy.cpp)" in capfd.readouterr().err
