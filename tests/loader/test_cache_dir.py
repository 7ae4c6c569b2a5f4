"""The cache directory: whose it may be, what happens when it is damaged, full or read-only."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from jitquant.cli import main
from jitquant.loader import CacheError, CompileError, DamagedEntryWarning
from jitquant.loader.store.cache import Cache, default_root
from jitquant.loader.store.prune import stored

from .conftest import Toy
from .toys import entries, finish, litter, new_loader, python, write_plain, write_toy

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners and mount")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_nothing_is_created_before_the_first_build(tmp_path: Path) -> None:
    out, _ = finish(
        python("import jitquant.loader; print('ok')", tmp_path / "cache", HOME=str(tmp_path))
    )
    assert out.strip() == "ok"
    assert list(tmp_path.iterdir()) == []


def test_directories_are_private_whatever_the_umask(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "source")
    old = os.umask(0)
    try:
        new_loader(tmp_path / "deep" / "er" / "cache").get("plain", [source])
    finally:
        os.umask(old)
    cache = tmp_path / "deep" / "er" / "cache"
    assert mode(cache) == 0o700
    assert {mode(path) for path in cache.glob("**/") if path.is_dir()} == {0o700}
    assert litter(cache) == []


def test_environment_chooses_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITQUANT_CACHE_DIR", str(tmp_path / "chosen"))
    assert default_root() == tmp_path / "chosen"
    monkeypatch.delenv("JITQUANT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root() == tmp_path / "xdg" / "jitquant"


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o777, 0o720])
def test_directory_that_others_can_write_to_is_refused(
    plain: Toy, tmp_path: Path, bits: int
) -> None:
    source, cache = plain.copy(tmp_path)
    cache.chmod(bits)
    with pytest.raises(CacheError, match=f"has mode {bits:04o}.*run `chmod 700 {cache}`"):
        new_loader(cache).get("plain", [source])


@needs_root
def test_directory_of_somebody_else_is_refused(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    os.chown(cache, 12345, 12345)
    with pytest.raises(CacheError, match=r"is owned by uid 12345.*JITQUANT_CACHE_DIR"):
        new_loader(cache).get("plain", [source])


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(CacheError, match="is not a directory"):
        new_loader(tmp_path / "cache").get("plain", [write_plain(tmp_path / "source")])


def damage_truncate(entry: Path) -> None:
    library = next(entry.glob("*.so"))
    library.write_bytes(library.read_bytes()[:1000])


def damage_flip(entry: Path) -> None:
    library = next(entry.glob("*.so"))
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)


def damage_no_library(entry: Path) -> None:
    next(entry.glob("*.so")).unlink()


def damage_no_description(entry: Path) -> None:
    (entry / "entry.json").unlink()


def damage_description(entry: Path) -> None:
    (entry / "entry.json").write_text("{")


def damage_headers(entry: Path) -> None:
    path = entry / "entry.json"
    path.write_text(path.read_text().replace("src0/plain.h", "src0/other.h"))


@pytest.mark.parametrize(
    "damage",
    [
        damage_truncate,
        damage_flip,
        damage_no_library,
        damage_no_description,
        damage_description,
        damage_headers,
    ],
)
def test_damaged_entry_is_said_once_and_built_again(
    plain: Toy, tmp_path: Path, damage: object
) -> None:
    source, cache = plain.copy(tmp_path)
    (entry,) = entries(cache)
    damage(entry)  # type: ignore[operator]
    with pytest.warns(DamagedEntryWarning, match="is damaged: .*; it is built again") as said:
        assert new_loader(cache).get("plain", [source]).library.factor() == 3
    assert len(said) == 1
    assert len(entries(cache)) == 1
    assert litter(cache) == []
    assert new_loader(cache).get("plain", [source]).library.factor() == 3


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("part", ["entries/*", "entry.json", "*.so"])
def test_an_entry_that_cannot_be_read_now_is_kept(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, number: int
) -> None:
    source, cache = plain.copy(tmp_path)
    (entry,) = entries(cache)
    refused = entry.parent if part == "entries/*" else next(entry.glob(part))

    def refuse(path: object) -> None:
        if str(path) == str(refused):
            raise OSError(number, os.strerror(number), str(path))

    def listdir(path: str = ".", real: Callable[..., list[str]] = os.listdir) -> list[str]:
        refuse(path)
        return real(path)

    def opened(path: object, *args: object, real: Callable[..., object] = open) -> object:
        refuse(path)
        return real(path, *args)

    def read_bytes(path: Path, real: Callable[[Path], bytes] = Path.read_bytes) -> bytes:
        refuse(path)
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr("jitquant.loader.store.cache.os.listdir", listdir)
        patch.setattr("jitquant.loader.store.cache.open", opened, raising=False)
        patch.setattr(Path, "read_bytes", read_bytes)
        why = re.escape(f"{refused} cannot be read by uid {os.geteuid()} ({os.strerror(number)})")
        with pytest.raises(CacheError, match=why):
            new_loader(cache).get("plain", [source])
    assert entries(cache) == [entry]
    assert new_loader(cache).get("plain", [source]).library.factor() == 3
    assert entries(cache) == [entry]
    assert litter(cache) == []


@pytest.fixture
def read_only(plain: Toy, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(source, cache) with the cache on a read-only mount."""
    source, cache = plain.copy(tmp_path)
    for command in (["mount", "--bind", cache, cache], ["mount", "-o", "remount,bind,ro", cache]):
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            subprocess.run(["umount", cache], capture_output=True, check=False)
            pytest.skip("this environment allows no mounts")
    yield source, cache
    subprocess.run(["umount", "-l", cache], check=True)


@needs_root
def test_read_only_cache_serves_hits_and_a_miss_goes_to_a_private_place(
    read_only: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    source, cache = read_only
    loader = new_loader(cache)
    assert loader.get("plain", [source]).library.factor() == 3
    assert capfd.readouterr().err == ""
    source.with_suffix(".h").write_text("#define FACTOR 4\n")
    module = loader.get("plain", [source])
    assert module.library.factor() == 4
    said = capfd.readouterr().err
    assert f"the cache {cache} cannot be written to; building into a private temporary" in said
    assert cache not in module.path.parents
    assert mode(loader.cache().temporary().root) == 0o700
    shutil.rmtree(loader.cache().temporary().root)


@needs_root
def test_commands_that_write_say_that_a_cache_is_read_only(
    read_only: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source, cache = read_only
    monkeypatch.setenv("JITQUANT_CACHE_DIR", str(cache))

    def said(*words: str, code: int) -> str:
        capfd.readouterr()
        assert main(words) == code
        return "".join(capfd.readouterr())

    assert "in the cache already" in said("build", str(source), code=0)
    assert [build.in_use for build in stored(Cache(cache))] == [False]
    source.with_suffix(".h").write_text("#define FACTOR 4\n")
    text = said("build", str(source), code=1)
    assert f"cache directory {cache} cannot be written to, and plain is not in it" in text
    for words in (["prune", "--max-size", "0"], ["clear"]):
        text = said("cache", *words, code=1)
        assert f"cache directory {cache} cannot be written to by uid 0 (it is read-only" in text
    bundle = source.parent / "bundle"
    assert str(bundle) in said("bundle", str(source), "-o", str(bundle), code=0)
    assert len(entries(cache)) == 1


@needs_root
def test_full_disk_is_a_clear_error_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "none", disk],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("this environment allows no mounts")
    try:
        source = write_plain(tmp_path / "source")
        loader = new_loader(disk)
        filler = disk / "filler"
        filler.write_bytes(b"x" * (492 << 10))
        with pytest.raises(CacheError, match=r"no space left for .*JITQUANT_CACHE_DIR"):
            loader.get("plain", [source])
        assert entries(disk) == []
        assert litter(disk) == []
        filler.unlink()
        assert loader.get("plain", [source]).library.factor() == 3
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@needs_root
@pytest.mark.parametrize("size", ["4k", "120k", "1400k"])
def test_a_full_disk_is_named_whatever_the_compiler_says_of_it(
    tmp_path: Path, nvcc: None, size: str
) -> None:
    """What nvcc prints then goes to no file; with 4 KiB it does not say why it failed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", disk]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this environment allows no mounts")
    try:
        with pytest.raises(CacheError, match=r"no space left for .*JITQUANT_CACHE_DIR"):
            new_loader(disk).get("toy", [write_toy(tmp_path / "source")])
        assert litter(disk) == []
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_wrong_source_on_a_nearly_full_disk_is_still_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_plain(tmp_path / "source")
    source.write_text("int x = y;\n")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", Mock(side_effect=full))
    with pytest.raises(CompileError, match="'y' was not"):
        new_loader(tmp_path / "cache").get("plain", [source])


def test_missing_tmpdir_does_no_harm(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = plain.copy(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    source.with_suffix(".h").write_text("#define FACTOR 4\n")
    assert new_loader(cache).get("plain", [source]).library.factor() == 4


def test_cache_removed_under_a_running_process(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    module = loader.get("plain", [source])
    shutil.rmtree(cache)
    assert loader.get("plain", [source]) is module
    source.with_suffix(".h").write_text("#define FACTOR 4\n")
    assert loader.get("plain", [source]).library.factor() == 4


def test_header_removed_after_a_build_is_a_compile_error(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    loader.get("plain", [source])
    source.with_suffix(".h").unlink()
    with pytest.raises(CompileError, match=r"plain\.h: No such file"):
        loader.get("plain", [source])
    source.unlink()
    with pytest.raises(FileNotFoundError, match=r"plain\.cpp"):
        loader.get("plain", [source])


def test_entry_tells_what_it_was_made_from(plain: Toy) -> None:
    last = Cache(plain.cache).last("plain")
    assert last is not None
    assert last["inputs"]["sources"][0][0] == "plain.cpp"
    assert list(last["headers"]) == ["src0/plain.h"]
    assert last["info"]["seconds"] > 0
