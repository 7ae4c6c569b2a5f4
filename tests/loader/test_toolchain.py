"""Finding the compilers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from jitquant.loader import HostCompilerNotFoundError, Loader, NvccNotFoundError
from jitquant.loader.compile.commands import make_units
from jitquant.loader.machine import toolchain as tools
from jitquant.loader.machine.memo import Memo
from jitquant.loader.machine.toolchain import Nvcc, cudart_flags, find_host_compiler, find_nvcc
from jitquant.loader.request.plan import Request

from .toys import entries, new_loader, write_factor, write_plain, write_toy


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """An environment, and a machine, that lead to no nvcc."""
    real = os.path.isfile
    monkeypatch.setattr(tools, "_in_wheels", lambda name: None)
    monkeypatch.setattr(
        tools.os.path, "isfile", lambda p: real(p) and not str(p).startswith("/usr/local/cuda")
    )
    return {"PATH": str(tmp_path)}


def fake_nvcc(directory: Path, runtime: str = "libcudart_static.a") -> Path:
    """A toolkit whose nvcc answers questions and compiles nothing."""
    (directory / "bin").mkdir(parents=True)
    (directory / "include").mkdir()
    (directory / "lib64").mkdir()
    if runtime:
        (directory / "lib64" / runtime).write_text("")
    nvcc = directory / "bin" / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        f'echo run >> "{directory}/runs"\n'
        'case "$1" in\n'
        '  --version) echo "Cuda compilation tools, release 13.0, V13.0.88";;\n'
        f'  --dryrun) echo "#$ _HERE_={directory}/bin";;\n'
        "  --list-gpu-arch) echo compute_80; echo compute_90;;\n"
        "esac\n"
    )
    nvcc.chmod(0o755)
    return nvcc


def test_no_nvcc_says_where_it_looked_and_what_to_install(
    nowhere: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(NvccNotFoundError) as caught:
        find_nvcc(Memo(), {**nowhere, "CUDA_HOME": str(tmp_path / "gone")})
    text = str(caught.value)
    assert f"CUDA_HOME={tmp_path / 'gone'}: no {tmp_path / 'gone'}/bin/nvcc" in text
    assert "/usr/local/cuda: no /usr/local/cuda/bin/nvcc" in text
    assert "Install jitquant's extra 'nvcc' (`pip install -e '.[nvcc]'` in a checkout)" in text


def test_a_kernel_without_nvcc_raises_and_a_cpp_does_not(
    nowhere: dict[str, str], tmp_path: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("g++", "c++", "as", "ld", "sh", "ninja", "which"):
        program = shutil.which(name)
        if program:
            (tmp_path / name).symlink_to(program)
    monkeypatch.setenv("PATH", nowhere["PATH"])
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with pytest.raises(NvccNotFoundError):
        loader.get("toy", [write_toy(tmp_path / "source")])
    assert loader.get("plain", [write_plain(tmp_path / "source")]).library.factor() == 3


def test_order_of_places(nowhere: dict[str, str], tmp_path: Path) -> None:
    home = fake_nvcc(tmp_path / "home")
    path = fake_nvcc(tmp_path / "path")
    env = {"PATH": str(path.parent), "CUDA_HOME": str(home.parents[1])}
    found, notes = find_nvcc(Memo(), env)
    assert (found.path, notes) == (str(home), ())
    assert found.origin == f"CUDA_HOME={home.parents[1]}"
    assert found.archs == (80, 90)
    found, notes = find_nvcc(Memo(), {**env, "CUDA_HOME": str(tmp_path / "gone")})
    assert found.path == str(path)
    assert notes == (f"CUDA_HOME={tmp_path / 'gone'} has no bin/nvcc",)
    found, _ = find_nvcc(Memo(), {"PATH": "", "CUDA_PATH": str(home.parents[1])})
    assert found.path == str(home)


def test_wheel_comes_after_the_variables_and_before_path(
    nowhere: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = fake_nvcc(tmp_path / "wheel", runtime="libcudart.so.13")
    path = fake_nvcc(tmp_path / "path")
    monkeypatch.setattr(tools, "_in_wheels", lambda name: str(wheel))
    found, _ = find_nvcc(Memo(), {"PATH": str(path.parent)})
    assert found.path == str(wheel)
    runtime = wheel.parents[1] / "lib64" / "libcudart.so.13"
    assert cudart_flags(found) == [str(runtime), f"-Wl,-rpath,{runtime.parent}"]
    found, _ = find_nvcc(Memo(), {"PATH": "", "CUDA_HOME": str(path.parents[1])})
    assert found.path == str(path)
    assert cudart_flags(found)[1:] == ["-ldl", "-lrt", "-lpthread"]


def test_of_two_wheels_that_of_the_newer_cuda_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "wheel_roots", lambda: [str(tmp_path)])
    assert tools._in_wheels("nvcc") is None
    for folder in ("cuda_nvcc", "cu13"):
        nvcc = fake_nvcc(tmp_path / folder)
        assert tools._in_wheels("nvcc") == str(nvcc)


def test_wrapper_script_leads_to_the_toolkit_behind_it(
    nowhere: dict[str, str], tmp_path: Path
) -> None:
    real = fake_nvcc(tmp_path / "toolkit")
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    found, _ = find_nvcc(Memo(), {"PATH": str(wrapper.parent)})
    assert found.path == str(real)
    assert not found.keeps_objects
    assert found.include_dirs == (str(tmp_path / "toolkit" / "include"),)


def test_nvcc_that_does_not_work_is_passed_over_and_said(
    nowhere: dict[str, str], tmp_path: Path
) -> None:
    bad = fake_nvcc(tmp_path / "bad")
    bad.write_text("#!/bin/sh\necho broken\n")
    no_runtime = fake_nvcc(tmp_path / "no_runtime", runtime="")
    good = fake_nvcc(tmp_path / "good")
    env = {
        "CUDA_HOME": str(bad.parents[1]),
        "CUDA_PATH": str(no_runtime.parents[1]),
        "PATH": str(good.parent),
    }
    found, notes = find_nvcc(Memo(), env)
    assert found.path == str(good)
    assert len(notes) == 2
    with pytest.raises(NvccNotFoundError, match=r"(?s)does not work: broken.*has no libcudart"):
        find_nvcc(Memo(), {**env, "PATH": ""})


def memo_in(directory: Path) -> Memo:
    memo = Memo()
    memo.attach(directory)
    return memo


def test_answers_are_kept_until_the_compiler_changes(
    nowhere: dict[str, str], tmp_path: Path
) -> None:
    nvcc = fake_nvcc(tmp_path / "toolkit")
    kept = tmp_path / "kept"
    kept.mkdir()
    env = {"PATH": "", "CUDA_HOME": str(nvcc.parents[1])}

    def runs() -> int:
        return len((tmp_path / "toolkit" / "runs").read_text().split())

    memory = memo_in(kept)
    find_nvcc(memory, env)
    first = runs()
    find_nvcc(memory, env)
    memory.keep()
    find_nvcc(memo_in(kept), env)
    assert runs() == first
    nvcc.write_text(nvcc.read_text().replace("V13.0.88", "V13.9.999"))
    memory = memo_in(kept)
    assert find_nvcc(memory, env)[0].version == "13.9.999"
    memory.keep()
    before = runs()
    for path in kept.iterdir():
        assert path.stat().st_mode & 0o777 == 0o644
        path.chmod(0o666)  # anybody could have written it
    find_nvcc(memo_in(kept), env)
    assert runs() > before
    for path in kept.iterdir():
        path.write_text("{")
    assert find_nvcc(memo_in(kept), env)[0].version == "13.9.999"


def test_a_part_of_a_toolkit_that_comes_or_goes_is_found(
    nowhere: dict[str, str], tmp_path: Path
) -> None:
    """As by pip: nvcc is the same as before."""
    nvcc = fake_nvcc(tmp_path / "toolkit")
    toolkit, env, memo = nvcc.parents[1], {"PATH": "", "CUDA_HOME": str(nvcc.parents[1])}, Memo()
    says = f'echo \'#$ SYSTEM_INCLUDES="-isystem" "{toolkit}/cccl"\''
    nvcc.write_text(nvcc.read_text().replace("--dryrun) ", f"--dryrun) {says};"))
    before, _ = find_nvcc(memo, env)
    (toolkit / "cccl").mkdir()
    (toolkit / "lib64" / "libcudart_static.a").rename(toolkit / "lib64" / "libcudart.so.13")
    after, _ = find_nvcc(memo, env)
    assert {*after.include_dirs} - {*before.include_dirs} == {str(toolkit / "cccl")}
    assert (before.cudart_name, after.cudart_name) == ("libcudart_static.a", "libcudart.so.13")


def test_why_a_compiler_failed_is_not_kept(nowhere: dict[str, str], tmp_path: Path) -> None:
    """It may have run out of memory once, or lacked what is installed by now."""
    nvcc, kept, fails = fake_nvcc(tmp_path / "toolkit"), tmp_path / "kept", tmp_path / "fails"
    kept.mkdir()
    cxx = tmp_path / "c++"
    cxx.write_text(f'#!/bin/sh\n[ ! -e {fails} ] || exit 1\nexec {shutil.which("g++")} "$@"\n')
    cxx.chmod(0o755)
    nvcc.write_text(
        nvcc.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n[ ! -e {fails} ] || exit\n")
    )
    env = {"PATH": str(nvcc.parent), "CXX": str(cxx)}
    memory = memo_in(kept)
    fails.touch()
    with pytest.raises(HostCompilerNotFoundError):
        find_host_compiler(memory, env)
    with pytest.raises(NvccNotFoundError):
        find_nvcc(memory, env)
    fails.unlink()
    for memo in (memory, memo_in(kept)):
        assert find_host_compiler(memo, env).program == str(cxx)
        assert find_nvcc(memo, env)[0].path == str(nvcc)


def test_nvcc_is_asked_with_the_host_compiler_that_it_will_use(
    nowhere: dict[str, str], tmp_path: Path
) -> None:
    """It runs one even for a dry run, and there may be no gcc on PATH."""
    nvcc, kept = fake_nvcc(tmp_path / "toolkit"), tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "cccl").mkdir()
    says = f'[ "$2" = -ccbin ] || exit; echo \'"-isystem" "{tmp_path}/cccl"\''
    nvcc.write_text(nvcc.read_text().replace("--dryrun) ", f"--dryrun) {says};"))
    env = {"PATH": str(nvcc.parent)}
    assert str(tmp_path / "cccl") not in find_nvcc(memo_in(kept), env)[0].include_dirs
    env["CXX"] = str(shutil.which("g++"))
    assert str(tmp_path / "cccl") in find_nvcc(memo_in(kept), env)[0].include_dirs


def test_host_compiler(tmp_path: Path) -> None:
    with pytest.raises(HostCompilerNotFoundError, match=r"neither g\+\+ nor c\+\+ is on PATH"):
        find_host_compiler(Memo(), {"PATH": str(tmp_path)})
    with pytest.raises(HostCompilerNotFoundError, match="CXX='gone' is not a program"):
        find_host_compiler(Memo(), {"PATH": os.environ["PATH"], "CXX": "gone"})
    with pytest.raises(HostCompilerNotFoundError, match="does not work"):
        find_host_compiler(Memo(), {"PATH": os.environ["PATH"], "CXX": "true"})
    with pytest.raises(HostCompilerNotFoundError, match=r"CXX='g\+\+ \"': No closing quotation;"):
        find_host_compiler(Memo(), {"PATH": os.environ["PATH"], "CXX": 'g++ "'})
    wrapper = tmp_path / "ccache"
    wrapper.write_text('#!/bin/sh\nexec "$@"\n')
    wrapper.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    found = find_host_compiler(Memo(), {"PATH": path, "CXX": "ccache g++ -m64"})
    assert found.program == "g++"
    assert found.flags == ("-m64",)
    assert "version" in found.version


def test_compilers_are_asked_in_english(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With LC_ALL=C.UTF-8 messages are in the LANGUAGE that is set, if it is not empty."""
    foreign = tmp_path / "g++"
    foreign.write_text('#!/bin/sh\n[ -z "$LANGUAGE" ] || exec echo Fehler >&2\nexec g++ "$@"\n')
    foreign.chmod(0o755)
    monkeypatch.setenv("CXX", str(foreign))
    monkeypatch.setenv("LANGUAGE", "de")
    module = new_loader(tmp_path / "cache").get("plain", [write_plain(tmp_path / "source")])
    assert module.library.factor() == 3


@pytest.mark.parametrize("variable", ["CXX", "PATH", "JITQUANT_NVCC_LAUNCHER"])
def test_a_relative_path_to_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Compilers run in another directory."""
    wrapper = tmp_path / "bin" / "g++"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@"\n')
    if variable == "JITQUANT_NVCC_LAUNCHER":
        wrapper.write_text('#!/bin/sh\nexec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    value = f"bin:{os.environ['PATH']}" if variable == "PATH" else "bin/g++"
    monkeypatch.setenv(variable, value)
    loader = new_loader(tmp_path / "cache")
    assert loader.get("plain", [write_plain(tmp_path / "source")]).library.factor() == 3


def test_ccache_style_wrapper_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvcc: None
) -> None:
    wrapper = tmp_path / "ccache"
    wrapper.write_text('#!/bin/sh\nexec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"{wrapper} g++")
    module = new_loader(tmp_path / "cache").get("toy", [write_toy(tmp_path / "source")])
    assert "scale" in dir(module)


def test_architecture_that_this_nvcc_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    from jitquant.loader import UnsupportedArchError

    nvcc = fake_nvcc(tmp_path / "toolkit")
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
    with pytest.raises(UnsupportedArchError, match=r"'100a' \(from archs=\) is not known to nvcc"):
        loader.get("toy", [write_toy(tmp_path / "source")], archs="10.0")


def test_setting_that_leads_nowhere_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    loader: Loader,
    nvcc: None,
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    loader.get("toy", [write_toy(tmp_path / "source")])
    assert f"CUDA_HOME={tmp_path / 'gone'} has no bin/nvcc; using " in capfd.readouterr().err


def test_shared_runtime_is_preferred_by_its_soname(tmp_path: Path) -> None:
    for name in ("libcudart.so.13", "libcudart.so.13.0.96", "libcudart.so"):
        (tmp_path / name).write_text("")
    found = tools._find_cudart([str(tmp_path)])
    assert found == str(tmp_path / "libcudart.so.13")
    nvcc = Nvcc("nvcc", "nvcc", "", "13.0.88", "here", (), found, ())
    assert nvcc.cudart_name == "libcudart.so.13"


def test_ninja_beside_python_but_not_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    pytest.importorskip("ninja")
    for name in ("g++", "c++", "as", "ld", "sh", "which"):
        program = shutil.which(name)
        if program:
            (tmp_path / name).symlink_to(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert loader.get("plain", [write_plain(tmp_path / "source")]).library.factor() == 3
    assert os.environ["PATH"] == str(tmp_path)


@pytest.mark.slow
def test_a_wrapper_of_nvcc_is_used_as_it_is_and_belongs_to_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvcc: None
) -> None:
    """Its own flags count, and so does an edit of it."""
    real = find_nvcc(Memo())[0].path
    wrapper = tmp_path / "cuda" / "bin" / "nvcc"
    wrapper.parent.mkdir(parents=True)
    source = write_toy(tmp_path / "source")
    source.with_suffix(".cuh").write_text("#define FACTOR WRAPPED\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    for value in (7, 80):
        wrapper.write_text(f'#!/bin/sh\nexec "{real}" -DWRAPPED={value} "$@"\n')
        wrapper.chmod(0o755)
        module = new_loader(tmp_path / "cache").get("toy", [source])
        assert module.scale(torch.ones(1), 1.0).item() == value
    assert len(entries(tmp_path / "cache")) == 2


@pytest.mark.slow
def test_a_launcher_runs_nvcc_and_the_host_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvcc: None
) -> None:
    """As sccache and ccache do."""
    log = tmp_path / "log"
    launcher = tmp_path / "bin" / "launch"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\necho "$1" "$3" >> "{log}"\nshift\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("PATH", str(launcher.parent), prepend=os.pathsep)
    source = write_toy(tmp_path / "source")
    loader = new_loader(tmp_path / "cache")
    without = loader.plan(loader.look_up(Request("toy", (source,))))
    monkeypatch.setenv("JITQUANT_NVCC_LAUNCHER", "launch --quick")
    module = loader.get("toy", [source])
    assert module.scale(torch.ones(1), 1.0).item() == 3
    ran = [line.split() for line in log.read_text().splitlines()]
    assert {word for word, _ in ran} == {"--quick"}
    assert loader.plan(loader.look_up(Request("toy", (source,)))).level1 != without.level1
    ccache = launcher.with_name("ccache")
    ccache.write_text('#!/bin/sh\nexec "$@"\n')
    ccache.chmod(0o755)
    monkeypatch.setenv("CXX", f"{ccache} g++")  # wrapped once is enough
    plan = loader.plan(loader.look_up(Request("toy", (source,))))
    units = make_units(plan, "toy", tmp_path)
    wrapped = [unit.command.argv[:3] for unit in units]
    assert wrapped[0][:2] == (str(launcher), "--quick")
    assert wrapped[1][:2] == (str(ccache), "g++")
    monkeypatch.setenv("JITQUANT_NVCC_LAUNCHER", "no-such-program")
    with pytest.raises(ValueError, match="'no-such-program' is not a program on PATH"):
        loader.plan(loader.look_up(Request("toy", (source,))))


def test_a_launcher_is_given_the_same_command_for_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else sccache would never have compiled it before. A name that is taken is not given again."""
    launcher = tmp_path / "launch"
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("JITQUANT_NVCC_LAUNCHER", str(launcher))
    source = write_plain(tmp_path / "source")
    request = Request("plain", (source,))

    def name(cache: str) -> str:
        build = new_loader(tmp_path / cache).ensure(request)
        build.hold.release()
        return build.entry.extension

    first = name("one")
    assert name("two") == first
    write_factor(source.with_suffix(".h"), 4)
    assert name("two") != first
    write_factor(source.with_suffix(".h"), 3)
    # A header that plain text does not show.
    source.write_text('#define H "hidden.h"\n#include H\n' + source.read_text())
    (source.parent / "hidden.h").write_text("")
    third = name("two")
    (source.parent / "hidden.h").write_text("// edited\n")
    assert name("two") != third
