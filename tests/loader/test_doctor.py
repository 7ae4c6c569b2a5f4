"""What doctor finds, each with its fix; and the build that it tries."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jitquant.loader import CompileError, LoaderError
from jitquant.loader.machine import toolchain as tools
from jitquant.loader.machine.nvml import Driver, Gpu
from jitquant.loader.machine.torch_install import torch_install
from jitquant.loader.store.cache import Cache
from jitquant.loader.tools import doctor as module
from jitquant.loader.tools.doctor import Diagnosis, Finding, examine
from jitquant.loader.tools.trial_build import try_build

from .toys import new_loader

H200 = Gpu("NVIDIA H200", 90)


@pytest.fixture
def no_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave out the build, for tests of one finding; and nothing of the person who runs them."""
    monkeypatch.setattr(module, "try_build", lambda plan_of: 0.1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def of(diagnosis: Diagnosis, check: str, state: str) -> list[Finding]:
    return [f for f in diagnosis.findings if (f.check, f.state) == (check, state)]


def one(diagnosis: Diagnosis, check: str, state: str) -> Finding:
    (finding,) = of(diagnosis, check, state)
    return finding


def test_all_is_well_after_really_building(nvcc: None, tmp_path: Path) -> None:
    loader = new_loader(tmp_path / "cache")
    found = examine(loader)
    assert found.works, found
    assert "compiled, linked, loaded and called" in one(found, "trial build", "ok").text
    assert torch_install().version in of(found, "torch", "ok")[0].text
    assert "used, the first that works" in of(found, "nvcc", "ok")[0].text
    assert "sm_90a" in one(found, "architectures", "ok").text
    assert {f.check for f in found.findings} >= {
        *("torch", "driver", "nvcc", "architectures", "host compiler", "ninja"),
        *("jobs", "cache", "trial build"),
    }
    assert not (tmp_path / "cache").exists()


def test_whatever_is_not_in_order_has_its_fix(no_trial: None, tmp_path: Path) -> None:
    for finding in examine(new_loader(tmp_path / "cache")).findings:
        assert bool(finding.fix) or finding.state in ("ok", "note")


def test_a_trial_that_fails_says_what_the_compiler_says(
    nvcc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--no-such-flag")
    with pytest.raises(CompileError):
        try_build(new_loader(tmp_path / "cache").plan_of)
    found = examine(new_loader(tmp_path / "cache"))
    assert not found.works
    assert "Unknown option '--no-such-flag'" in one(found, "trial build", "error").text


def test_a_library_that_does_not_load_is_no_success(
    nvcc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "torch"
    directory.mkdir()
    for name in ("libtorch_cpu.so", "libtorch.so", "libc10.so"):
        shutil.copy(Path(torch_install().library_dir, "libc10.so"), directory / name)
    from jitquant.loader.tools import trial_build

    other = torch_install()._replace(directory=str(tmp_path))
    monkeypatch.setattr(trial_build, "torch_install", lambda: other)
    (tmp_path / "lib").symlink_to(directory)
    with pytest.raises(LoaderError, match="aoti_torch_device_type_cpu"):
        try_build(new_loader(tmp_path / "cache").plan_of)


def test_no_nvcc_is_an_error(
    no_trial: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.path.isfile
    monkeypatch.setattr(tools, "_in_wheels", lambda name: None)
    monkeypatch.setattr(tools.os.path, "isfile", lambda p: real(p) and not str(p).endswith("/nvcc"))
    monkeypatch.setenv("CUDA_HOME", "/gone")
    found = examine(new_loader(tmp_path / "cache"))
    assert not found.works
    assert "jitquant's extra 'nvcc'" in one(found, "nvcc", "error").fix
    assert of(found, "nvcc", "warning")[0] == Finding(
        "nvcc",
        "warning",
        "CUDA_HOME=/gone: no /gone/bin/nvcc",
        "Unset CUDA_HOME, or set it to a CUDA toolkit.",
    )


def test_no_host_compiler_and_no_ninja_are_errors(
    no_trial: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    found = examine(new_loader(tmp_path / "cache"))
    host = one(found, "host compiler", "error")
    assert "neither g++ nor c++ is on PATH" in host.text
    assert "apt install g++" in f"{host.text} {host.fix}"
    assert one(found, "ninja", "error").fix == "Run `pip install ninja`."


def test_ninja_of_the_package_will_do(
    no_trial: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = examine(new_loader(tmp_path / "cache"))
    assert "on PATH" not in one(found, "ninja", "ok").text


@pytest.mark.parametrize(
    ("driver", "cuda", "state", "said"),
    [
        (Driver("580.1", "13.0", (H200,)), None, "warning", "is a build for CPUs"),
        (
            Driver("550.1", "12.4", (H200,)),
            "13.0",
            "warning",
            "driver supports CUDA up to 12.4",
        ),
        (Driver("1", "13.0", (Gpu("T4", 75),)), "13.0", "warning", "T4, sm_75: not an arch"),
        (Driver("580.1", "13.0", (H200,)), "13.0", "ok", "NVIDIA H200, sm_90"),
    ],
)
def test_driver_gpus_and_torch_that_do_not_fit(
    no_trial: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: Driver,
    cuda: str | None,
    state: str,
    said: str,
) -> None:
    here = torch_install()._replace(cuda=cuda)
    monkeypatch.setattr(module, "read_driver", lambda: driver)
    monkeypatch.setattr(module, "torch_install", lambda: here)
    found = examine(new_loader(tmp_path / "cache"))
    assert any(said in f.text for f in of(found, "gpu", state)), found.findings
    assert driver.version in one(found, "driver", "ok").text


PARTS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-runtime")


@pytest.mark.parametrize(
    ("versions", "cuda", "state", "said"),
    [
        (("13.0.88", "13.0.88", "13.0.96"), "13.0", "ok", "which torch is built for, too (13.0)"),
        (("13.5.37", "13.5.37", "13.5.37"), None, "ok", "parts of one CUDA release: nvidia-cuda-n"),
        (("13.5.37", "13.5.37", "13.5.37"), "12.8", "ok", "parts of one CUDA release: nvidia-cud"),
        (("13.5.37", "13.0.88", "13.0.96"), "13.0", "warning", "parts of different CUDA releases:"),
        (("13.5.37", "13.5.37", "13.5.37"), "13.2", "warning", "torch is built for CUDA 13.2, and"),
    ],
)
def test_parts_from_pypi_that_do_not_fit(
    no_trial: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    versions: tuple[str, ...],
    cuda: str | None,
    state: str,
    said: str,
) -> None:
    here = torch_install()._replace(cuda=cuda)
    monkeypatch.setattr(module, "torch_install", lambda: here)
    monkeypatch.setattr(module, "wheel_versions", lambda: dict(zip(PARTS, versions, strict=True)))
    found = one(examine(new_loader(tmp_path / "cache")), "wheels", state)
    assert said in found.text
    assert (f"nvcc,nvvm]=={cuda}.*'" in found.fix) == (state == "warning")


def test_an_nvcc_newer_than_the_driver(
    nvcc: None, no_trial: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "read_driver", lambda: Driver("470", "11.4", ()))
    found = examine(new_loader(tmp_path / "cache"))
    assert "supports CUDA up to 11.4" in of(found, "nvcc", "warning")[0].text
    here = torch_install()._replace(cuda="12.6")
    monkeypatch.setattr(module, "torch_install", lambda: here)
    assert "torch from 12.6" in of(examine(new_loader(tmp_path)), "nvcc", "note")[-1].text


@pytest.mark.parametrize(
    ("version", "works"), [("2.10.1+cu130", False), ("2.11.0", True), ("3.0.0a0+git12", True)]
)
def test_a_torch_that_is_too_old(
    no_trial: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, works: bool
) -> None:
    here = torch_install()._replace(version=version)
    monkeypatch.setattr(module, "torch_install", lambda: here)
    found = examine(new_loader(tmp_path / "cache"))
    assert [f.state for f in found.findings if f.check == "torch"] == ["ok" if works else "error"]


def test_architectures_that_cannot_be(
    no_trial: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITQUANT_CUDA_ARCHS", "7.5")
    found = examine(new_loader(tmp_path / "cache"))
    assert "is older than 8.0" in one(found, "architectures", "error").text
    monkeypatch.setenv("JITQUANT_CUDA_ARCHS", "")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5;9.0")
    found = examine(new_loader(tmp_path / "cache"))
    assert "7.5: skipped" in one(found, "architectures", "note").text


def test_the_cache(no_trial: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cache"
    assert "the first build creates it" in one(examine(new_loader(root)), "cache", "ok").text
    root.mkdir(mode=0o700)
    assert "mode 0700" in one(examine(new_loader(root)), "cache", "ok").text
    root.chmod(0o777)
    found = examine(new_loader(root))
    assert found.works
    refused = one(found, "cache", "warning")
    assert "others can write to it" in refused.text
    assert refused.fix.startswith(f"Run `chmod -R go-w {root}` if nobody did")
    root.chmod(0o700)
    monkeypatch.setattr(module, "has_locks", lambda place: False)
    assert "has no locks" in one(examine(new_loader(root)), "cache", "warning").text
    monkeypatch.setattr(
        module.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10, 9, 5 << 20)
    )
    monkeypatch.setattr(module, "shared_file_system", lambda place: "nfs")
    found = examine(new_loader(root))
    assert any("5 MiB are free" in f.text for f in of(found, "cache", "warning"))
    assert "it is on nfs, which other machines write to" in one(found, "cache", "note").text


@pytest.mark.parametrize(
    ("number", "state", "said"),
    [
        (errno.ENOENT, "error", "cache: [Errno 2] No such file or directory."),
        (errno.EROFS, "warning", "cannot be written to: every process builds for itself"),
    ],
)
def test_a_cache_that_cannot_be_made(
    no_trial: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    state: str,
    said: str,
) -> None:
    def refuse(prefix: str, dir: Path) -> str:
        assert dir == tmp_path
        raise OSError(number, os.strerror(number), f"{dir}/{prefix}")

    loader = new_loader(tmp_path / "not" / "cache")
    examine(loader)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(module.tempfile, "mkdtemp", refuse)
    found = examine(loader)
    assert said in one(found, "cache", state).text
    assert "JITQUANT_CACHE_DIR" in one(found, "cache", state).fix
    assert of(found, "cache", "ok") == []
    assert found.works == (state == "warning")


def test_who_is_building_is_named(no_trial: None, tmp_path: Path) -> None:
    loader = new_loader(tmp_path / "cache")
    cache = loader.cache()
    assert cache.prepare()
    with cache.lock("abcdef", timeout=1.0, beat=1.0, on_wait=lambda owner, waited: None):
        found = one(examine(loader), "locks", "note").text
    assert found.startswith(f"process {os.getpid()} on ")
    assert of(examine(loader), "locks", "note") == []


def test_bundles_and_jobs(no_trial: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITQUANT_BUNDLES", str(tmp_path / "none"))
    monkeypatch.setattr(module, "available_bytes", lambda: 100 << 20)
    found = examine(new_loader(tmp_path / "cache"))
    assert "is not a bundle" in one(found, "bundles", "warning").text
    texts = [finding.text for finding in of(found, "jobs", "warning")]
    assert ["0.1 GiB of memory are free, and nvcc may need one GiB" in text for text in texts] == [
        True
    ]
    assert found.works


def test_what_cannot_be_looked_at_does_not_hide_the_rest(
    no_trial: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cache: object) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "locks")

    monkeypatch.setattr(Cache, "builders", refuse)
    found = examine(new_loader(tmp_path / "cache"))
    text = one(found, "locks", "warning").text
    assert text.startswith("could not be read (PermissionError: ")
    assert of(found, "cache", "ok")


def test_settings(no_trial: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("JITQUANT_")]:
        monkeypatch.delenv(name)
    assert not [f for f in examine(new_loader(tmp_path)).findings if f.check == "settings"]
    monkeypatch.setenv("JITQUANT_RELOAD", "yes")
    monkeypatch.setenv("JITQUANT_JOBS", "many")
    monkeypatch.setenv("JITQUANT_QUIET", "1")
    monkeypatch.setenv("JITQUANT_CACHEDIR", "/x")
    found = examine(new_loader(tmp_path))
    assert [(f.text, f.fix) for f in of(found, "settings", "error")] == [
        (
            "JITQUANT_JOBS='many' is not understood",
            "Give a number of compilers, 1 or more, or unset it.",
        ),
        (
            "JITQUANT_RELOAD='yes' is not understood",
            "Give 1 (look for edits) or 0, or unset it.",
        ),
    ]
    assert not found.works
    assert one(found, "settings", "ok").text == "JITQUANT_QUIET='1'"
    assert one(found, "settings", "note").fix == "JITQUANT_CACHE_DIR is meant?"


def test_it_asks_nothing_of_torch_itself(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv[0] = 'jitquant'\n"
        "from jitquant.cli import main\n"
        "code = main(['doctor', '--json'])\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "JITQUANT_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
