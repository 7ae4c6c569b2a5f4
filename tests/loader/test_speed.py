"""What a hit does without; ./scripts/bench loader has the figures."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from jitquant.loader.machine.memo import settled
from jitquant.loader.watch.inotify import TRUST_SECONDS

from .conftest import Toy
from .toys import finish, new_loader, python


def test_a_hit_looks_at_the_files_every_half_second_only(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = new_loader(toy.cache)
    looks = 0

    def stat(path: object, *args: object, real: object = os.stat, **options: object) -> object:
        nonlocal looks
        looks += str(path) == str(toy.source)
        return real(path, *args, **options)  # type: ignore[operator]

    time.sleep(0.15)  # until the files are settled
    for _ in range(10):
        module = loader.get("toy", [toy.source])
    monkeypatch.setattr(os, "stat", stat)
    started = time.monotonic()
    for _ in range(10000):
        assert loader.get("toy", [toy.source]) is module
    assert looks <= (time.monotonic() - started) / TRUST_SECONDS + 1
    loader.freeze()
    looks = 0
    for _ in range(1000):
        assert loader.get("toy", [toy.source]) is module
    assert looks == 0


def test_a_file_with_a_date_in_the_future_is_not_read_each_time(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    changed = file.stat().st_ctime_ns
    os.utime(file, ns=(changed, changed + 10**14))
    status = file.stat()
    assert not settled(status, status.st_ctime_ns)
    assert settled(status, status.st_ctime_ns + 3 * 10**9)


def test_a_warm_load_in_a_new_process_runs_and_imports_nothing_for_compiling(toy: Toy) -> None:
    code = f"""
        import torch, sys
        from pathlib import Path
        source = Path({str(toy.source)!r})
        import subprocess
        def refuse(*args, **kwargs): raise AssertionError(args)
        from jitquant.loader import get_cuda_module
        subprocess.Popen.__init__ = refuse
        module = get_cuda_module("toy", [source])
        assert "torch.utils.cpp_extension" not in sys.modules
        assert "filelock" not in sys.modules
        parts = [name for name in sys.modules if name.startswith("jitquant.loader.")]
        assert not [name for name in parts if name.split(".")[2] in ("compile", "nvrtc", "tools")]
        """
    new_loader(toy.cache).get("toy", [toy.source])  # has to ask the compilers for their versions
    finish(python(code, toy.cache, CUDA_VISIBLE_DEVICES=""))
