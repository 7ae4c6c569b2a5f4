"""Every wrong argument has its error, before anything is compiled or created."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from jitquant.loader import Loader, UnsupportedArchError
from jitquant.loader.request.plan import Request, check_flags
from jitquant.loader.settings import check_settings, setting

from .toys import new_loader, write_plain, write_toy


@pytest.mark.parametrize(
    "name", ["../../x", "a b", "", "1a", "a-b", "a.b", "é", "a" * 101, "a\n", "a;rm"]
)
def test_name_that_is_no_identifier(loader: Loader, tmp_path: Path, name: str) -> None:
    source = write_plain(tmp_path)
    with pytest.raises(ValueError, match="name: expected a C identifier"):
        loader.get(name, [source])
    assert not (tmp_path / "cache").exists()


def test_name_that_is_no_string(loader: Loader, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="name: expected a string, got int"):
        loader.get(3, [write_plain(tmp_path)])  # type: ignore[arg-type]


def test_missing_kernel_lists_near_names(tmp_path: Path) -> None:
    write_toy(tmp_path / "kernels_cu", stem="quantize_nvfp4")
    loader = new_loader(tmp_path / "cache", kernels_dir=tmp_path / "kernels_cu")
    with pytest.raises(FileNotFoundError, match=r"Near names: quantize_nvfp4\.cu") as caught:
        loader.get("q", ["quantise_nvfp4.cu"])
    assert "give a path: './quantise_nvfp4.cu'" in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"There are: quantize_nvfp4\.cu"):
        loader.get("q", ["zzz.cu"])


def test_missing_file_of_the_caller_says_where_it_looked(loader: Loader, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"looked at .*gone\.cu\)\.$"):
        loader.get("q", [tmp_path / "gone.cu"])
    write_plain(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"Near names: plain\.cpp\.$"):
        loader.get("q", [tmp_path / "plian.cpp"])


@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        ([], ValueError, "the list is empty"),
        ("k.cu", TypeError, r"sources: expected a list, got 'k.cu'"),
        ([b"k.cu"], TypeError, "is bytes"),
        ([3], TypeError, "sources: 3 is int"),
        (7, TypeError, "sources: expected a list"),
        (["./k.ptx"], ValueError, r"suffix '.ptx'; .cu, .cpp, .cc, .cxx are compiled"),
        (["./k.CU"], ValueError, r"suffix '.CU'; .cu, .cpp, .cc, .cxx are compiled"),
    ],
)
def test_sources_of_a_wrong_kind(
    loader: Loader, sources: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        loader.get("k", sources)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "argument", ["sources", "include_dirs", "cuda_flags", "cxx_flags", "archs"]
)
def test_an_iterator_is_refused_that_one_look_uses_up(
    loader: Loader, tmp_path: Path, argument: str
) -> None:
    arguments: dict[str, object] = {"sources": [write_plain(tmp_path)]}
    for iterator in (map(str, ["-DA"]), (flag for flag in ["-DA"])):
        with pytest.raises(
            TypeError, match=rf"^{argument}: expected a list .*; give list\(\.\.\.\)"
        ):
            loader.get("k", **{**arguments, argument: iterator})  # type: ignore[arg-type]
    assert not (tmp_path / "cache").exists()


class OwnPath:
    """A path that may come to be another."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


class WithoutHash(OwnPath):
    """One that equals others of its class, so that it cannot be a key."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithoutHash)

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [OwnPath, WithoutHash])
def test_a_path_of_another_class_is_taken_by_its_value(
    loader: Loader, tmp_path: Path, kind: type[OwnPath]
) -> None:
    three, four = write_plain(tmp_path / "a"), write_plain(tmp_path / "b", 4)
    time.sleep(0.15)  # or everything is so new that nothing is trusted
    given = kind(three)
    first = loader.get("plain", [given])
    assert first.library.factor() == 3
    assert loader.get("plain", [three]) is loader.get("plain", [kind(three)]) is first
    given.path = four
    assert loader.get("plain", [given]).library.factor() == 4
    included = kind(three.parent)
    (tmp_path / "c.cpp").write_text(three.read_text())
    for directory, factor in ((three.parent, 3), (four.parent, 4)):
        included.path = directory
        module = loader.get("c", [tmp_path / "c.cpp"], include_dirs=[included])
        assert module.library.factor() == factor


def test_directory_and_repeated_sources(loader: Loader, tmp_path: Path) -> None:
    (tmp_path / "d.cu").mkdir()
    with pytest.raises(ValueError, match="is a directory"):
        loader.get("k", [tmp_path / "d.cu"])
    os.mkfifo(tmp_path / "pipe.cpp")
    with pytest.raises(ValueError, match=r"sources: '.*pipe\.cpp' is a pipe or a device; give a"):
        loader.get("pipe", [tmp_path / "pipe.cpp"])
    with pytest.raises(ValueError, match="is a directory; name the file in it"):
        loader.get("k", [tmp_path])
    source = write_plain(tmp_path)
    with pytest.raises(ValueError, match="is named twice"):
        loader.get("k", [source, source])


def test_a_null_character(loader: Loader) -> None:
    with pytest.raises(
        ValueError, match=r"cxx_flags: '-DX=\\x00' contains a null character; leave"
    ):
        loader.get("k", ["./k.cpp"], cxx_flags=["-DX=\0"])


def test_a_path_that_goes_up_from_a_link(loader: Loader, tmp_path: Path) -> None:
    (tmp_path / "there" / "below").mkdir(parents=True)
    write_plain(tmp_path / "there")
    (tmp_path / "link").symlink_to(tmp_path / "there" / "below")
    source = write_plain(tmp_path)
    up = f"{tmp_path}/link/../"
    with pytest.raises(ValueError, match=f"sources: .* leads to {tmp_path}/there/{source.name}"):
        loader.get("k", [up + source.name])
    with pytest.raises(ValueError, match=f"include_dirs: .* leads to {tmp_path}/there,"):
        loader.get("k", [source], include_dirs=[up])
    loader.get("k", [f"{tmp_path}/there/../{source.name}"])


def test_missing_include_directory(loader: Loader, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"include_dirs: .*nowhere"):
        loader.get("k", [write_plain(tmp_path)], include_dirs=[tmp_path / "nowhere"])
    with pytest.raises(TypeError, match="include_dirs: expected a list"):
        loader.get("k", [write_plain(tmp_path)], include_dirs="include")


@pytest.mark.parametrize(
    "flag", ["-arch=sm_90", "-gencode=arch=compute_90,code=sm_90", "--gpu-code=sm_80", "-gencode"]
)
def test_flag_that_selects_an_architecture(loader: Loader, tmp_path: Path, flag: str) -> None:
    with pytest.raises(ValueError, match=r"selects an architecture; give archs="):
        loader.get("k", [write_toy(tmp_path)], cuda_flags=[flag])


@pytest.mark.parametrize(
    "flags",
    [
        *(["-rdc=true"], ["--relocatable-device-code=true"], ["-dc"], ["--device-c"]),
        *(["-rdc", "true"], ["-lineinfo", "--relocatable-device-code", "true"]),
    ],
)
def test_flag_for_separate_compilation(loader: Loader, tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(ValueError, match="separate device compilation"):
        loader.get("k", [write_toy(tmp_path)], cuda_flags=flags)


@pytest.mark.parametrize(
    "flags",
    [
        *(
            "-M",
            "-MM",
            "-MMD",
            "-MFx.d",
            "-O1 -o",
            "-E",
            "-S",
            "-###",
            "-fsyntax-only",
            "--version",
        ),
        *("-dumpversion", "-print-file-name=x", "--help=optimizers", "-O3 --dependencies"),
        *("-Xpreprocessor -MMD", "-Xclang -emit-llvm", "-ox.o", "--output=x.o"),
    ],
)
def test_flag_with_which_no_object_is_written(loader: Loader, tmp_path: Path, flags: str) -> None:
    named = re.escape(f"got {flags.split()[-1]!r}. Leave it out")
    for write, argument in ((write_plain, "cxx_flags"), (write_toy, "cuda_flags")):
        with pytest.raises(ValueError, match=f"cxx_flags: expected flags .*{named}"):
            loader.get("k", [write(tmp_path)], **{argument: flags.split()})  # type: ignore[arg-type]
    (tmp_path / "flags").write_text(flags)
    with pytest.raises(ValueError, match=named):
        loader.get("k", [write_plain(tmp_path)], cxx_flags=[f"@{tmp_path}/flags"])
    assert not (tmp_path / "cache").exists()


def test_a_file_of_flags_for_the_linker_is_read_as_such(loader: Loader, tmp_path: Path) -> None:
    flags, source = tmp_path / "flags", write_plain(tmp_path)
    flags.write_text("-E -M")  # of a compiler, these write no object
    given = [f"-Wl,@{flags}"]
    assert loader.get("k", [source], cxx_flags=given).library.factor() == 3
    flags.write_text("-E -o x")
    with pytest.raises(ValueError, match=r"got '-o'\. Leave it out"):
        loader.get("k", [source], cxx_flags=given)


@pytest.mark.parametrize(
    "flags",
    [
        *("-ptx", "--cubin", "--fatbin", "-dryrun", "-V", "--generate-dependencies", "-cuda"),
        *("-fdevice-syntax-only", "--list-gpu-arch", "-Xcompiler -M", "-Xcompiler=-Wall,-E"),
        *("--compiler-options -Wall,-fsyntax-only", "-o=x.o", "-Xcompiler -ox.o"),
    ],
)
def test_flag_with_which_nvcc_writes_no_object(
    loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    with pytest.raises(ValueError, match=r"got '-.*'\. Leave it out"):
        loader.get("k", [write_toy(tmp_path)], cuda_flags=flags.split())
    monkeypatch.setenv("NVCC_APPEND_FLAGS", flags)
    with pytest.raises(ValueError, match=r"got '-.*'\. Leave it out"):
        loader.get("k", [write_toy(tmp_path)])


@pytest.mark.parametrize(
    "flags", ["-Wl,-z,now,-o,x", "-Wl,-ox", "-Wl,--outp=x", "-Xlinker -o", "-Wl,--version"]
)
def test_flag_with_which_the_linker_writes_no_library(
    loader: Loader, tmp_path: Path, flags: str
) -> None:
    with pytest.raises(ValueError, match=r"got '-.*'\. Leave it out"):
        loader.get("k", [write_plain(tmp_path)], cxx_flags=flags.split())


@pytest.mark.parametrize(
    "flags",
    [
        "-Xlinker -M -Xlinker -E -Wl,-E -Wl,-M -lib -Wa,-MD,x -Xptxas -v -Xptxas=-M",
        "-v -H -c -dumpbase x -Xcompiler -Wall,-v -save-temps --keep -run-args x",
        "-odir x -objtemp -opt-info inline -Wl,--version-script=x,-z,origin,--orphan-handling=warn",
    ],
)
def test_flag_that_looks_like_one_of_these(flags: str) -> None:
    check_flags(tuple(flags.split()), flags.split())


def test_flag_against_separate_compilation() -> None:
    check_flags(("-rdc=false",), ())
    check_flags(("-rdc", "false"), ())


@pytest.mark.parametrize("name", ["$x", 'a"b', "a`b", "a\\b", "a\nb"])
def test_path_that_nvcc_would_read_as_something_else(
    loader: Loader, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ValueError, match=r"sources: .* does not take literally"):
        loader.get("toy", [write_toy(tmp_path / name)])


@pytest.mark.parametrize("name", ["a,b", "a'b"])
def test_directory_that_nvcc_would_read_as_something_else(
    loader: Loader, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r"include_dirs: .* does not take literally"):
        loader.get("toy", [write_toy(tmp_path)], include_dirs=[tmp_path / name])


@pytest.mark.usefixtures("nvcc")
def test_unsupported_architecture(loader: Loader, tmp_path: Path) -> None:
    source = write_toy(tmp_path / "source")
    with pytest.raises(UnsupportedArchError, match=r"'7.5' is older than 8.0. Accepted: 8.0, 8.6"):
        loader.get("k", [source], archs="7.5")
    with pytest.raises(UnsupportedArchError, match=r"^archs: the list is empty; .*'native'"):
        loader.get("k", [source], archs=[])
    with pytest.raises(UnsupportedArchError, match=r"architecture ' , ;' names nothing"):
        loader.get("k", [source], archs=[" ", ";"])
    with pytest.raises(TypeError, match="archs: 90 is int"):
        loader.get("k", [source], archs=[90])  # type: ignore[list-item]


def test_the_variable_that_names_a_wrong_architecture_is_named(
    loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITQUANT_CUDA_ARCHS", "9.0;sm_70")
    with pytest.raises(UnsupportedArchError, match=r"^JITQUANT_CUDA_ARCHS='9.0;sm_70': .*'sm_70'"):
        loader.get("toy", [write_toy(tmp_path)])


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("JITQUANT_JOBS", "x", "a number of compilers, 1 or more"),
        ("JITQUANT_JOBS", "0", "a number of compilers, 1 or more"),
        ("JITQUANT_LOCK_TIMEOUT", "-1", "a number of seconds, 0 or more"),
        ("JITQUANT_LOCK_TIMEOUT", "nan", "a number of seconds, 0 or more"),
        ("JITQUANT_QUIET", "true", r"1 \(nothing on stderr\) or 0"),
        ("JITQUANT_RELOAD", "yes", r"1 \(look for edits\) or 0"),
    ],
)
def test_a_wrong_variable_is_refused_before_anything_is_built(
    loader: Loader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    accepted: str,
) -> None:
    source = write_plain(tmp_path / "source")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name}={value!r}: give {accepted}\\.$"):
        loader.get("plain", [source])
    with pytest.raises(ValueError, match=f"^{name}={value!r}: give {accepted}\\.$"):
        loader.ensure(Request("plain", (source,)))
    assert not (tmp_path / "cache").exists()


def test_what_a_variable_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in {
        "JITQUANT_JOBS": ("", "1", "16", "04"),
        "JITQUANT_LOCK_TIMEOUT": ("", "0", "600", "0.5", ".5", "1e3", "inf"),
        "JITQUANT_QUIET": ("", "0", "1"),
        "JITQUANT_RELOAD": ("", "0", "1"),
    }.items():
        for value in values:
            monkeypatch.setenv(name, value)
            assert setting(name) == value
            check_settings()


def test_binding_beside_a_kernel_is_taken_unless_one_is_named(tmp_path: Path) -> None:
    from jitquant.loader.request.sources import kernel_files, resolve_sources

    source = write_toy(tmp_path / "source")
    binding = source.parent / "bindings" / "toy.cpp"
    other = write_plain(tmp_path / "source")
    assert resolve_sources([source], tmp_path) == (str(source), str(binding))
    assert resolve_sources([source, other], tmp_path) == (str(source), str(other))
    assert resolve_sources(["toy.cu"], source.parent) == (str(source), str(binding))
    # The same in folders of kernels_cu, whose bindings are all in one.
    room = source.parent / "room"
    room.mkdir()
    inside = source.rename(room / "inside.cu")
    binding = binding.rename(binding.with_name("inside.cpp"))
    for given in ("inside.cu", inside):
        assert resolve_sources([given], source.parent) == (str(inside), str(binding))
    assert resolve_sources([inside], room) == (str(inside),)
    assert kernel_files(source.parent) == {"inside": inside}
    own = source.parent / "inside.cu"
    own.write_text("")
    assert resolve_sources(["inside.cu"], source.parent) == (str(own), str(binding))
    assert kernel_files(source.parent) == {"inside": own}
