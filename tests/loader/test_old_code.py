"""What runs is what is written: each way in which old code was once taken for the new."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from quick import in_quick

from jitquant.loader import CompileError, Loader
from jitquant.loader.machine import memo as memo_module
from jitquant.loader.machine.memo import FileState, Memo
from jitquant.loader.request.plan import Request
from jitquant.loader.tools.explain import explain

from .toolkits import write_toolkit
from .toys import entries, new_loader, write_factor

SOURCE = '#include {header}\nextern "C" int factor() {{ return FACTOR; }}\n'


def write(path: Path, header: str = "<foo.h>") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SOURCE.format(header=header))
    return path


def factor(loader: Loader, source: Path, **arguments: object) -> int:
    module = loader.get(source.stem, [source], **arguments)  # type: ignore[arg-type]
    return int(module.library.factor())


#: How a directory can get on the include path: flags of a request, or variables.
Way = Callable[[list[Path], pytest.MonkeyPatch], dict[str, list[str]]]


def flags(argument: str, *form: str) -> Way:
    def way(directories: list[Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
        return {argument: [part.format(d) for d in directories for part in form]}

    return way


def variable(name: str, form: str, separator: str) -> Way:
    def way(directories: list[Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
        monkeypatch.setenv(name, separator.join(form.format(d) for d in directories))
        return {}

    return way


WAYS = {
    "cxx -I": ("k.cpp", flags("cxx_flags", "-I{}")),
    "cuda CPATH": ("k.cu", variable("CPATH", "{}", ":")),
    "cuda -isystem": ("k.cu", flags("cuda_flags", "-isystem", "{}")),
    "cxx -I apart": ("k.cpp", flags("cxx_flags", "-I", "{}")),
    "cxx -isystem": ("k.cpp", flags("cxx_flags", "-isystem", "{}")),
    "cxx CPATH": ("k.cpp", variable("CPATH", "{}", ":")),
    "cxx include_dirs": ("k.cpp", flags("include_dirs", "{}")),
    "cuda -I": ("k.cu", flags("cuda_flags", "-I{}")),
    "cuda NVCC_APPEND_FLAGS": ("k.cu", variable("NVCC_APPEND_FLAGS", "-I{}", " ")),
}


@pytest.mark.parametrize("name", in_quick(3, WAYS))
def test_a_header_is_read_anew_wherever_it_was_found(
    name: str, tmp_path: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, way = WAYS[name]
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    source = write(tmp_path / "source" / file)
    write_factor(second / "foo.h", 3)
    arguments = way([first, second], monkeypatch)
    loader = new_loader(tmp_path / "cache")
    assert factor(loader, source, **arguments) == 3
    for value, header in ((4, second), (5, first)):  # an edit, then a header that shadows it
        write_factor(header / "foo.h", value)
        assert factor(loader, source, **arguments) == value
        again = new_loader(tmp_path / "cache")
        assert factor(again, source, **arguments) == value
    built = len(entries(tmp_path / "cache"))
    (first / "foo.h").unlink()
    assert factor(loader, source, **arguments) == 4
    write_factor(second / "other.h", 6)
    assert factor(loader, source, **arguments) == 4
    assert len(entries(tmp_path / "cache")) == built == 3


@pytest.mark.parametrize("file", ["k.cpp", "k.cu"])
def test_a_directory_that_was_not_there_can_shadow(
    file: str, tmp_path: Path, toolkit: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write(tmp_path / "source" / file)
    second.mkdir()
    write_factor(second / "foo.h", 3)
    argument = {"k.cpp": "cxx_flags", "k.cu": "cuda_flags"}[file]
    arguments = {argument: [f"-I{first}", f"-I{second}"]}
    loader = new_loader(tmp_path / "cache")
    assert factor(loader, tmp_path / "source" / file, **arguments) == 3
    first.mkdir()
    write_factor(first / "foo.h", 4)
    assert factor(loader, tmp_path / "source" / file, **arguments) == 4
    assert factor(new_loader(tmp_path / "cache"), tmp_path / "source" / file, **arguments) == 4


def test_a_header_beside_the_one_that_includes_it_shadows(tmp_path: Path) -> None:
    source = write(tmp_path / "source" / "k.cpp", '"outer.h"')
    include = tmp_path / "include"
    (include / "deep").mkdir(parents=True)
    (source.parent / "outer.h").write_text("#include <deep/inner.h>\n")
    (include / "deep" / "inner.h").write_text('#include "foo.h"\n')
    write_factor(include / "foo.h", 3)
    loader = new_loader(tmp_path / "cache")
    assert factor(loader, source, include_dirs=[include]) == 3
    write_factor(include / "deep" / "foo.h", 4)
    assert factor(loader, source, include_dirs=[include]) == 4


def test_a_variable_that_is_gone_leaves_nothing_behind(
    tmp_path: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, include = tmp_path / "cache", tmp_path / "inc"
    include.mkdir()
    write_factor(include / "foo.h", 3)
    monkeypatch.setenv("CPATH", str(include))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", f"-I{include}")
    assert factor(new_loader(cache), write(tmp_path / "k.cu")) == 3
    monkeypatch.delenv("CPATH")
    monkeypatch.delenv("NVCC_APPEND_FLAGS")
    source = write(tmp_path / "k2.cu", '"inc/foo.h"')
    loader = new_loader(cache)
    assert factor(loader, source) == 3
    write_factor(include / "foo.h", 4)
    assert explain(new_loader(cache), Request("k2", (source,))).state == "miss"
    assert factor(loader, source) == 4
    assert factor(new_loader(cache), source) == 4


@pytest.mark.parametrize("place", ["include", "include/cccl"])
def test_headers_of_the_toolkit_may_change_under_the_same_nvcc(
    place: str, tmp_path: Path, toolkit: Path
) -> None:
    source = write(tmp_path / "k.cu")
    write_factor(toolkit / place / "foo.h", 3)
    loader = new_loader(tmp_path / "cache")
    assert factor(loader, source) == 3
    for _ in range(20):
        loader.get("k", [source])  # so often that it is watched
    write_factor(toolkit / place / "foo.h", 4)
    assert factor(loader, source) == 4
    assert factor(new_loader(tmp_path / "cache"), source) == 4


def test_the_runtime_that_is_linked_in_is_known_by_its_contents(
    tmp_path: Path, toolkit: Path
) -> None:
    source = tmp_path / "k.cu"
    source.write_text('extern "C" int cudart(); extern "C" int factor() { return cudart(); }\n')
    assert factor(new_loader(tmp_path / "cache"), source) == 1
    write_toolkit(toolkit, cudart=2)
    assert factor(new_loader(tmp_path / "cache"), source) == 2
    write_toolkit(toolkit, cudart=1)
    assert factor(new_loader(tmp_path / "cache"), source) == 1


@pytest.mark.parametrize("calls", [1, 50])
def test_a_link_to_a_directory_may_come_to_lead_elsewhere(tmp_path: Path, calls: int) -> None:
    for value in (3, 4):
        (tmp_path / str(value) / "deep").mkdir(parents=True)
        write_factor(tmp_path / str(value) / "deep" / "foo.h", value)
    link = tmp_path / "links" / "inc"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "3")
    source = write(tmp_path / "source" / "k.cpp", "<deep/foo.h>")
    loader = new_loader(tmp_path / "cache")
    assert factor(loader, source, include_dirs=[link]) == 3
    time.sleep(0.15)  # or everything is so new that nothing is trusted
    for _ in range(calls):
        loader.get("k", [source], include_dirs=[link])
    other = tmp_path / "other"
    other.symlink_to(tmp_path / "4")
    other.rename(link)
    assert factor(loader, source, include_dirs=[link]) == 4


def test_a_link_to_a_directory_that_is_searched_anyway_may_come_to_lead_elsewhere(
    tmp_path: Path,
) -> None:
    """GCC leaves it out while it leads to the other directory."""
    for value in (3, 4):
        (tmp_path / str(value)).mkdir()
        write_factor(tmp_path / str(value) / "foo.h", value)
    link = tmp_path / "inc"
    link.symlink_to(tmp_path / "3")
    source = write(tmp_path / "source" / "k.cpp", "<foo.h>")
    flags = [f"-I{link}", "-isystem", str(tmp_path / "3")]
    loader = new_loader(tmp_path / "cache")
    assert factor(loader, source, cxx_flags=flags) == 3
    link.unlink()
    link.symlink_to(tmp_path / "4")
    assert factor(loader, source, cxx_flags=flags) == 4
    assert factor(new_loader(tmp_path / "cache"), source, cxx_flags=flags) == 4


@pytest.mark.parametrize(
    "name", in_quick(2, ["cxx -I", "cuda CPATH", "cxx -isystem", "cuda -isystem"])
)
def test_a_link_to_a_header_may_come_to_lead_elsewhere(
    name: str, tmp_path: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a tree of links that a package manager makes: GCC names a system header's target."""
    file, way = WAYS[name]
    place = tmp_path / "a" / "place" / "with" / "a" / "longer" / "name"
    place.mkdir(parents=True)
    for value in (3, 4, 5):
        write_factor(tmp_path / f"{value}.h", value)
    source = write(tmp_path / "source" / file)
    arguments = way([place], monkeypatch)
    loader = new_loader(tmp_path / "cache")
    for value in (3, 4):
        (place / "foo.h").unlink(missing_ok=True)
        (place / "foo.h").symlink_to(tmp_path / f"{value}.h")
        assert factor(loader, source, **arguments) == value
    (place / "foo.h").unlink()
    (place / "foo.h").symlink_to(tmp_path / "5.h")
    assert factor(new_loader(tmp_path / "cache"), source, **arguments) == 5


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_response_file_says_is_tracked(tmp_path: Path, nested: bool) -> None:
    source = tmp_path / "k.cpp"
    source.write_text('extern "C" int factor() { return FACTOR; }\n')
    inner, outer = tmp_path / "inner.txt", tmp_path / "outer.txt"
    outer.write_text(f"-g0 @{inner}\n")
    flags = [f"@{outer if nested else inner}"]
    loader = new_loader(tmp_path / "cache")
    for value in (3, 4):
        inner.write_text(f"-DFACTOR={value}\n")
        assert factor(loader, source, cxx_flags=flags) == value
    inner.write_text("-DFACTOR=3\n")
    assert factor(new_loader(tmp_path / "cache"), source, cxx_flags=flags) == 3
    assert len(entries(tmp_path / "cache")) == 2


@pytest.mark.slow
def test_what_a_file_of_nvccs_options_says_is_tracked(tmp_path: Path, nvcc: None) -> None:
    source = tmp_path / "k.cu"
    source.write_text('extern "C" int factor() { return FACTOR; }\n')
    options = tmp_path / "options.txt"
    loader = new_loader(tmp_path / "cache")
    for value in (3, 4):
        options.write_text(f"-DFACTOR={value}\n")
        assert factor(loader, source, cuda_flags=["-optf", str(options)]) == value


def archive(directory: Path, value: int) -> Path:
    directory.mkdir(exist_ok=True)
    code = directory / "part.cpp"
    code.write_text(f'extern "C" int part() {{ return {value}; }}\n')
    subprocess.run(["g++", "-fPIC", "-c", code, "-o", code.with_suffix(".o")], check=True)
    library = directory / "libpart.a"
    library.unlink(missing_ok=True)
    subprocess.run(["ar", "rcs", library, code.with_suffix(".o")], check=True)
    return library


@pytest.mark.parametrize(
    "form", [["-Wl,{0}/libpart.a"], ["-L{0}", "-lpart"], ["-Wl,-L{0},-l:libpart.a"]]
)
def test_an_archive_that_is_linked_in_is_tracked(tmp_path: Path, form: list[str]) -> None:
    source = tmp_path / "k.cpp"
    source.write_text('extern "C" int part();\nextern "C" int factor() { return part(); }\n')
    flags = [word.format(tmp_path / "part") for word in form]
    loader = new_loader(tmp_path / "cache")
    for value in (3, 4):
        archive(tmp_path / "part", value)
        assert factor(loader, source, cxx_flags=flags) == value
    archive(tmp_path / "part", 5)
    assert factor(new_loader(tmp_path / "cache"), source, cxx_flags=flags) == 5


def test_an_archive_in_a_directory_before_shadows(tmp_path: Path) -> None:
    source = tmp_path / "k.cpp"
    source.write_text('extern "C" int part();\nextern "C" int factor() { return part(); }\n')
    (tmp_path / "first").mkdir()
    archive(tmp_path / "second", 3)
    flags = [f"-L{tmp_path}/first", f"-L{tmp_path}/second", "-lpart"]
    loader = new_loader(tmp_path / "cache")
    assert factor(loader, source, cxx_flags=flags) == 3
    archive(tmp_path / "first", 4)
    assert factor(loader, source, cxx_flags=flags) == 4


def incbin(source: Path, data: Path) -> Path:
    source.write_text(
        f'asm(".section .rodata\\nblob: .incbin \\"{data}\\"\\n.text\\n");\n'
        'extern "C" { extern const unsigned char blob __attribute__((visibility("hidden")));\n'
        "int factor() { return blob; } }\n"
    )
    return source


def test_what_the_assembler_reads_is_tracked(tmp_path: Path) -> None:
    data = tmp_path / "data.bin"
    data.write_bytes(b"\x03")
    source = incbin(tmp_path / "k.cpp", data)
    loader = new_loader(tmp_path / "cache")
    assert factor(loader, source) == 3
    data.write_bytes(b"\x04")
    assert factor(loader, source) == 4
    assert factor(new_loader(tmp_path / "cache"), source) == 4


@pytest.mark.slow
def test_nvcc_tells_what_its_assembler_reads(tmp_path: Path, nvcc: None) -> None:
    data = tmp_path / "data.bin"
    data.write_bytes(b"\x03")
    source = incbin(tmp_path / "k.cu", data)
    source.write_text(
        f"#ifndef __CUDA_ARCH__\n{source.read_text()}#endif\n__global__ void kernel() {{}}\n"
    )
    loader = new_loader(tmp_path / "cache")
    assert factor(loader, source) == 3
    data.write_bytes(b"\x04")
    assert factor(loader, source) == 4


@pytest.mark.parametrize("directive", [".incbin", ".include"])
def test_what_the_assembler_reads_is_refused_if_it_does_not_say(
    directive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jitquant.loader.compile.commands.names_incbins", lambda plan: False)
    (tmp_path / "data.bin").write_bytes(b"")
    source = incbin(tmp_path / "k.cpp", tmp_path / "data.bin")
    source.write_text(source.read_text().replace(".incbin", directive))
    with pytest.raises(CompileError, match=rf"k\.cpp uses \{directive}, and the assembler"):
        new_loader(tmp_path / "cache").get("k", [source])
    assert not entries(tmp_path / "cache")


def test_what_the_host_compiler_of_nvcc_reads_last_is_tracked(tmp_path: Path, nvcc: None) -> None:
    source = tmp_path / "k.cu"
    source.write_text('__global__ void kernel() {}\nextern "C" int factor() { return 1; }\n')
    loader = new_loader(tmp_path / "cache")
    build = loader.ensure(Request("k", (source,)))
    build.hold.release()
    names = {Path(name).name for name in build.entry.headers}
    assert {"cuda_runtime.h", "host_runtime.h", "libcudart_static.a"} <= names


def test_a_hit_of_another_process_hashes_no_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source" / "k.cpp", '"foo.h"')
    write_factor(source.parent / "foo.h", 3)
    cache = tmp_path / "cache"
    factor(new_loader(cache), source)
    time.sleep(0.15)
    factor(new_loader(cache), source)  # what was too new to be trusted is written down now
    hashed: list[str] = []
    hash_file = Memo._hash

    def counting(memo: Memo, path: str) -> FileState:
        hashed.append(path)
        return hash_file(memo, path)

    monkeypatch.setattr(Memo, "_hash", counting)
    loader = new_loader(cache)
    assert factor(loader, source) == 3
    assert hashed == [str(source)]  # before the cache is looked at
    digests = cache / "v1" / "toolchain" / "files.json"
    assert digests.stat().st_mode & 0o777 == 0o644
    digests.chmod(0o666)  # anybody could have written it
    assert factor(new_loader(cache), source) == 3
    assert str(source.parent / "foo.h") in hashed


def test_a_header_of_another_image_may_have_all_but_its_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a squashfs that is mounted in place of another, where no file has its own ctime."""
    signature = (10**18, 10**18, 1, 1)
    monkeypatch.setattr(memo_module, "signature_of", lambda status: signature)
    monkeypatch.setattr(memo_module, "settled", lambda status, now: True)
    source, cache = write(tmp_path / "source" / "k.cpp", '"foo.h"'), tmp_path / "cache"
    for value in (3, 4):
        write_factor(source.parent / "foo.h", value)
        for _ in range(2):  # a build and a hit
            assert factor(new_loader(cache), source) == value
    kept = json.loads((cache / "v1" / "toolchain" / "files.json").read_text())["files"]
    assert kept  # of compilers it is
    assert not [path for path in kept if path.startswith(str(tmp_path))]


def test_the_toolkit_of_the_tests_compiles(tmp_path: Path, toolkit: Path) -> None:
    told = subprocess.run(
        [toolkit / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True
    )
    assert "V13.0.88" in told.stdout
