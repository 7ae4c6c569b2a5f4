"""The cache directory: whose it may be, what happens when it is damaged, full or read-only."""

from __future__ import annotations

import errno
import json
import os
import pwd
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
from jitquant.loader.request.plan import Request
from jitquant.loader.store.cache import Cache, default_root
from jitquant.loader.store.hold import Hold
from jitquant.loader.store.prune import stored

from .conftest import Toy
from .toys import entries, finish, litter, new_loader, python, write_factor, write_plain, write_toy

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
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # of a user in a container
    with pytest.raises(CacheError, match=r"home directory .*JITQUANT_CACHE_DIR"):
        default_root()


def refused(source: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """What is said once of a cache that nothing is loaded from, and nothing built in."""
    before = {path: path.stat() for path in [cache, *cache.rglob("*")]}
    capfd.readouterr()
    loader = new_loader(cache)
    for factor in (3, 4, 3):
        write_factor(source.with_suffix(".h"), factor)
        module = loader.get("plain", [source])
        assert cache not in module.path.parents
        assert module.library.factor() == factor
    assert mode(loader.cache().root) == 0o700
    assert {path: path.stat() for path in [cache, *cache.rglob("*")]} == before
    said = [line for line in capfd.readouterr().err.splitlines() if "nothing is loaded" in line]
    assert len(said) == 1
    shutil.rmtree(loader.cache().root)
    with pytest.raises(CacheError, match="could make this process load any code"):
        new_loader(cache, temporary=False).get("plain", [source])
    return said[0]


@pytest.mark.parametrize(
    ("part", "bits"),
    [
        *(("", bits) for bits in (0o770, 0o707, 0o777, 0o720)),
        ("v1/entries", 0o770),
        ("v1/toolchain", 0o707),
    ],
)
def test_nothing_is_loaded_from_a_directory_that_others_can_write_to(
    plain: Toy, tmp_path: Path, part: str, bits: int, capfd: pytest.CaptureFixture[str]
) -> None:
    source, cache = plain.copy(tmp_path)
    (cache / part).chmod(bits)
    said = refused(source, cache, capfd)
    assert f"cache directory {cache / part} has mode {bits:04o}: others can write to it" in said
    assert f"Run `chmod -R go-w {cache}` if nobody did, remove it if that is not sure" in said


@needs_root
def test_nothing_is_loaded_from_a_directory_of_somebody_else(
    plain: Toy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As with the home of a user that is mounted into a container of root's."""
    source, cache = plain.copy(tmp_path)
    os.chown(cache, 12345, 12345)
    said = refused(source, cache, capfd)
    assert "is owned by uid 12345, and this process is uid 0" in said
    assert "Set JITQUANT_CACHE_DIR to a directory of your own." in said


def writable(path: Path) -> None:
    path.chmod(0o777)


def foreign(path: Path) -> None:
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize("harm", [writable, pytest.param(foreign, marks=needs_root)])
@pytest.mark.parametrize("part", ["..", ".", "entry.json", "*.so"])
def test_an_entry_that_somebody_else_could_have_made_is_built_again(
    plain: Toy, tmp_path: Path, part: str, harm: Callable[[Path], None]
) -> None:
    source, cache = plain.copy(tmp_path)
    (entry,) = entries(cache)
    harm({"..": entry.parent, ".": entry}.get(part) or next(entry.glob(part)))
    with pytest.warns(DamagedEntryWarning, match="could make this process load any code") as said:
        module = new_loader(cache).get("plain", [source])
    assert [Path(warning.filename) for warning in said] == [Path(__file__)]
    assert module.library.factor() == 3
    assert module.path.name != next(plain.cache.glob("v1/entries/*/*/*.so")).name
    assert len(entries(cache)) == 1
    assert litter(cache) == []


def test_what_is_loaded_is_the_file_whose_digest_was_checked(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one takes its name in between."""
    source, cache = plain.copy(tmp_path)
    write_factor(source.with_suffix(".h"), 6)
    built = new_loader(cache).ensure(Request("plain", (source,)))
    built.hold.release()
    write_factor(source.with_suffix(".h"), 7)
    other = new_loader(cache).ensure(Request("plain", (source,)))
    other.hold.release()
    write_factor(source.with_suffix(".h"), 6)

    def swapped(hold: Hold, real: Callable[[Hold], str] = Hold.sha256) -> str:
        digest = real(hold)
        other.library.replace(built.library)
        return digest

    monkeypatch.setattr(Hold, "sha256", swapped)
    assert new_loader(cache).get("plain", [source]).library.factor() == 6


def test_a_library_is_loaded_whose_descriptor_an_earlier_one_had(
    plain: Toy, tmp_path: Path
) -> None:
    """The dynamic linker goes by names first, and a name is no more than that number."""
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    numbers: list[int] = []
    for factor in (11, 12):
        write_factor(source.with_suffix(".h"), factor)
        loader.ensure(Request("plain", (source,))).hold.release()
    for factor in (11, 12):
        write_factor(source.with_suffix(".h"), factor)
        module = loader.get("plain", [source])
        assert module.library.factor() == factor
        numbers.append(int(module.library._name.rpartition("/")[2]))
        os.close(numbers[-1])  # as a program does that closes all it does not know
    assert numbers[0] == numbers[1]


def test_a_cache_that_a_group_shares(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where JITQUANT_CACHE_GROUP names the group; made by another of its members."""
    source, cache = plain.copy(tmp_path)
    group, owner = os.getegid(), os.geteuid()
    if owner == 0:
        group, owner = 4321, 12345
    for path in [cache, *cache.rglob("*")]:
        os.chown(path, owner, group)
        path.chmod(0o2770 if path.is_dir() else 0o660)
    monkeypatch.setenv("JITQUANT_CACHE_GROUP", str(group))
    found = new_loader(cache).ensure(Request("plain", (source,)))
    assert cache in found.library.parents
    assert not found.is_new
    found.hold.release()
    write_factor(source.with_suffix(".h"), 4)
    before = os.umask(0o077)
    try:
        built = new_loader(cache).get("plain", [source])
        own = new_loader(tmp_path / "own").get("plain", [source])
    finally:
        os.umask(before)
    for path in (built.path, own.path):
        directory = path.parent
        assert (mode(directory), directory.stat().st_gid) == (0o2770, group)
        assert (mode(path), mode(directory / "entry.json")) == (0o644, 0o644)
    assert {mode(path) for path in (tmp_path / "own").glob("**/")} == {0o2770}
    assert {mode(path) for path in cache.glob("v1/locks/*.lock")} == {0o660}
    cache.chmod(0o2777)
    assert cache not in new_loader(cache).get("plain", [source]).path.parents
    monkeypatch.setenv("JITQUANT_CACHE_GROUP", "no such group")
    with pytest.raises(ValueError, match="JITQUANT_CACHE_GROUP='no such group': there is no such"):
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


def damage_nested(entry: Path) -> None:
    (entry / "entry.json").write_text("[" * 200_000)


def with_part(**parts: object) -> Callable[[Path], None]:
    def damage(entry: Path) -> None:
        path = entry / "entry.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | parts))

    return damage


def damage_pipe(entry: Path) -> None:
    (library,) = entry.glob("*.so")
    library.unlink()
    os.mkfifo(library, 0o600)


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
        damage_nested,
        with_part(inputs=[]),
        with_part(inputs={"archs": []}),
        with_part(ops=[5]),
        with_part(init_symbols=None),
        with_part(info={"seconds": 1, "built": None}),
        damage_pipe,
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

    def os_open(path: object, *args: int, real: Callable[..., int] = os.open) -> int:
        refuse(path)
        return real(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr("jitquant.loader.store.cache.os.listdir", listdir)
        patch.setattr("jitquant.loader.store.cache.open", opened, raising=False)
        patch.setattr("jitquant.loader.store.hold.os.open", os_open)
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


def test_what_is_remembered_may_be_json_of_another_kind(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    new_loader(cache).get("plain", [source])
    remembered = [cache / "v1" / "toolchain" / "files.json", cache / "v1" / "last" / "plain.json"]
    assert all(path.is_file() for path in remembered)
    for text in (
        *("null", "5", "[]", "{}", "[" * 100_000),
        *('{"files": 5, "notes": []}', '{"files": {"a": 1}, "notes": {"a": []}}'),
        *(f'{{"files": {{"{source}": 5}}, "notes": {{}}}}', '{"files": {}, "notes": {}, "a": {}}'),
        '{"inputs": 5, "headers": 5, "info": 5}',
        '{"inputs": {"sources": []}, "headers": [], "info": {}}',
        '{"inputs": {"sources": [5]}, "headers": {}, "info": {}}',
        json.dumps(Cache(cache).last("plain") | {"inputs": {"sources": []}}),  # type: ignore[operator]
        json.dumps(
            {"inputs": {"sources": []}, "headers": {}, "info": {"seconds": 1, "built": "1"}}
        ),
    ):
        for path in remembered:
            path.write_text(text)
        assert new_loader(cache).get("plain", [source]).library.factor() == 3
        assert Cache(cache).last("plain") is None
    write_factor(source.with_suffix(".h"), 4)
    assert new_loader(cache).get("plain", [source]).library.factor() == 4


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
    assert "src0/plain.h" in last["headers"]
    assert last["info"]["seconds"] > 0
