"""Pruning: the least recently used go, what a live process has loaded stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import warnings
from pathlib import Path

import pytest

from jitquant.loader.compile import builder
from jitquant.loader.machine.memo import Memo
from jitquant.loader.machine.scratch import new_scratch, scratch
from jitquant.loader.request.plan import Request
from jitquant.loader.store.cache import Cache, Entry, staged_by_this_machine
from jitquant.loader.store.hold import hold, unused
from jitquant.loader.store.prune import clear, prune, stored, trim

from .conftest import Toy
from .toys import PATIENCE_SECONDS, entries, fork, litter, new_loader, wait_for


def age(directory: Path, days: float) -> None:
    moment = time.time() - days * 86400
    os.utime(directory, (moment, moment))


@pytest.fixture
def three(plain: Toy, tmp_path: Path) -> tuple[Path, list[Path]]:
    """A cache with three builds, and their directories, the least recently used first."""
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    for number in (4, 5):
        source.with_suffix(".h").write_text(f"#define FACTOR {number}\n")
        loader.ensure(Request("plain", (source,))).hold.release()
    directories = sorted(entries(cache), key=lambda path: path.stat().st_mtime_ns)
    for days, directory in zip((30, 20, 10), directories, strict=True):
        age(directory, days)
    return cache, directories


def test_what_is_stored(three: tuple[Path, list[Path]]) -> None:
    cache, directories = three
    found = stored(Cache(cache))
    assert [build.directory for build in found] == directories
    assert {(build.name, build.in_use) for build in found} == {("plain", False)}
    files = [path.stat().st_size for path in directories[0].iterdir()]
    assert found[0].size == sum(files)


def test_the_least_recently_used_go_first(three: tuple[Path, list[Path]]) -> None:
    cache, directories = three
    size = stored(Cache(cache))[0].size
    done = prune(Cache(cache), max_size=2 * size + size // 2)
    assert [build.directory for build in done.removed] == directories[:1]
    assert done.size_before - done.size_after == done.removed[0].size
    assert set(entries(cache)) == set(directories[1:])
    assert litter(cache) == []


def test_the_old_ones_go(three: tuple[Path, list[Path]]) -> None:
    cache, directories = three
    done = prune(Cache(cache), older_than=15 * 86400)
    assert [build.directory for build in done.removed] == directories[:2]
    assert prune(Cache(cache), older_than=15 * 86400).removed == []


def test_to_be_loaded_is_to_be_used(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    (directory,) = entries(cache)
    age(directory, 30)
    loader = new_loader(cache)
    loader.ensure(Request("plain", (source,))).hold.release()
    assert prune(Cache(cache), older_than=86400).removed == []


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_live_process_has_loaded_stays_until_it_ends(
    plain: Toy, tmp_path: Path, end: int
) -> None:
    source, cache = plain.copy(tmp_path)
    loaded = tmp_path / "loaded"

    def use() -> bool:
        module = new_loader(cache).get("plain", [source])
        loaded.touch()
        time.sleep(PATIENCE_SECONDS)
        return bool(module)

    user = fork(use, tmp_path / "output")
    try:
        wait_for(loaded.exists)
        done = prune(Cache(cache), max_size=0, older_than=0)
        assert done.removed == []
        assert [build.name for build in done.in_use] == ["plain"]
        assert stored(Cache(cache))[0].in_use
        assert clear(Cache(cache)).removed == []
        assert len(entries(cache)) == 1
    finally:
        os.kill(user, end)
        os.waitpid(user, 0)
    assert len(prune(Cache(cache), max_size=0).removed) == 1
    assert entries(cache) == []


def test_a_forked_child_goes_on_using_it(plain: Toy, tmp_path: Path) -> None:
    library = next(plain.cache.glob("v1/entries/*/*/*.so"))
    copy = tmp_path / "copy.so"
    copy.write_bytes(library.read_bytes())
    held = hold(copy)
    assert held is not None
    child = fork(lambda: time.sleep(100) is None, tmp_path / "log")
    held.release()
    with unused(copy) as free:
        assert not free
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with unused(copy) as free:
        assert free
        assert hold(copy) is None  # it is just being removed


def test_a_program_started_by_a_user_of_it_does_not_keep_it(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(b"")
    held = hold(path)
    assert held is not None
    with subprocess.Popen(["sleep", "100"], close_fds=False) as other:
        held.release()
        with unused(path) as free:
            assert free
        other.kill()


@pytest.mark.slow
def test_nothing_is_lost_while_others_load_and_build(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    over = threading.Event()
    pruned = 0

    def keep_pruning() -> None:
        nonlocal pruned
        while not over.is_set():
            pruned += len(prune(Cache(cache), max_size=0).removed)

    thread = threading.Thread(target=keep_pruning)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(8):
                build = new_loader(cache).ensure(Request("plain", (source,)))
                assert build.library.is_file()
                time.sleep(0.02)
                assert build.library.is_file()
                before = pruned
                build.hold.release()
                if number % 2:  # else the next one races with its removal
                    wait_for(lambda then=before: pruned > then)
    finally:
        over.set()
        thread.join()
    assert pruned > 0


def test_a_build_is_kept_from_the_moment_it_is_there(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, root = plain.copy(tmp_path)
    prune(Cache(root), max_size=0)
    removed = []
    remember_last = Cache.remember_last

    def remember_and_prune(cache: Cache, entry: Entry) -> None:
        removed.extend(prune(Cache(root), max_size=0).removed)
        remember_last(cache, entry)

    monkeypatch.setattr(Cache, "remember_last", remember_and_prune)
    build = new_loader(root).ensure(Request("plain", (source,)))
    assert build.is_new
    assert build.library.is_file()
    assert removed == []
    build.hold.release()
    assert len(prune(Cache(root), max_size=0).removed) == 1


def test_the_place_of_a_build_may_be_pruned_while_it_is_published(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, root = plain.copy(tmp_path)
    prune(Cache(root), max_size=0)
    rename, pruned = os.rename, []

    def prune_and_rename(old: Path, new: Path) -> None:
        if new.parent.parent.name == "entries" and not pruned:
            new.parent.rmdir()
            pruned.append(new)
        rename(old, new)

    monkeypatch.setattr("jitquant.loader.store.cache.os.rename", prune_and_rename)
    build = new_loader(root).ensure(Request("plain", (source,)))
    assert build.is_new
    assert build.library.parent == pruned[0]


def test_what_was_just_removed_is_not_called_damaged(plain: Toy, tmp_path: Path) -> None:
    _, root = plain.copy(tmp_path)
    cache = Cache(root)
    (directory,) = entries(root)
    entry = Entry.from_json((directory / "entry.json").read_bytes())
    prune(cache, max_size=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.open_library(directory, entry) is None


def test_what_dead_builders_left_goes(plain: Toy, tmp_path: Path) -> None:
    _, cache = plain.copy(tmp_path)
    left = cache / "v1" / "staging" / f"{staged_by_this_machine('abc')}1-2"
    left.mkdir()
    busy = cache / "v1" / "staging" / f"{staged_by_this_machine('def')}1-2"
    busy.mkdir()
    foreign = cache / "v1" / "staging" / "abc@elsewhere-0a1b2c3d-1-2"
    foreign.mkdir()
    for kind in ("pruned", "damaged"):
        (cache / "v1" / "staging" / f"{kind}-12" / "deep").mkdir(parents=True)
    locks = set((cache / "v1" / "locks").iterdir())
    with Cache(cache).lock("def", timeout=1, beat=1, on_wait=lambda *_: None):
        prune(Cache(cache), older_than=1e9)
    assert set((cache / "v1" / "staging").iterdir()) == {busy, foreign}
    os.utime(foreign, (0, 0))
    prune(Cache(cache), older_than=1e9)
    assert litter(cache) == []
    names = {path.name for path in set((cache / "v1" / "locks").iterdir()) - locks}
    assert names <= {"abc.lock", "def.lock"}


def test_clear_forgets_all(plain: Toy, tmp_path: Path) -> None:
    _, cache = plain.copy(tmp_path)
    (cache / "v1" / "logs" / "x.log").write_text("")
    assert len(clear(Cache(cache)).removed) == 1
    left = [path for path in (cache / "v1").rglob("*") if path.is_file()]
    assert [path.parent.name for path in left if path.parent.name != "locks"] == []
    assert list((cache / "v1" / "entries").iterdir()) == []


def test_what_is_kept_beside_builds_is_bounded_too(plain: Toy, tmp_path: Path) -> None:
    """Objects that modules share, sources that were given as text, notes and logs."""
    _, root = plain.copy(tmp_path)
    base, now = root / "v1", time.time()
    old = [base / name for name in ("toolchain/a.o", "texts/b/k.cu", "last/c.json", "logs/d.log")]
    for age, path in enumerate(old):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1_000_000))
        at = path.parent if "texts" in str(path) else path
        os.utime(at, (now - 5000 + age, now - 5000 + age))
    new = base / "texts" / "new"
    new.mkdir()
    (new / "k.cu").write_bytes(bytes(9_000_000))
    assert trim(Cache(root), 8 * 12_500_000) is None
    assert [path.exists() for path in old] == [False, True, True, True]
    prune(Cache(root), max_size=8_000)
    assert not any(path.exists() for path in old)
    assert new.exists()  # somebody may just compile it


def test_what_a_killed_process_left_in_the_temporary_directory_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, old = tmp_path / "jitquant-cache-left", time.time() - 4000
    (left / "v1").mkdir(parents=True)
    in_use, held = new_scratch("cache")
    fresh = tmp_path / "jitquant-trial-fresh"
    fresh.mkdir()
    for path in (left, in_use):
        os.utime(path, (old, old))
    with scratch("trial") as mine:
        assert sorted(tmp_path.iterdir()) == sorted([in_use, fresh, mine])
    os.close(held)
    os.utime(in_use, (old, old))
    with scratch("trial"):
        assert not in_use.exists()
    assert list(tmp_path.iterdir()) == [fresh]


def test_the_digests_of_only_so_many_files_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jitquant.loader.machine.memo._MOST_KEPT", 3)
    files = [tmp_path / str(number) for number in range(6)]
    for path in files:
        path.write_text("")
        os.utime(path, (1, 1))
    time.sleep(0.15)  # or they are too new to be trusted
    memo = Memo()
    memo.attach(tmp_path)
    for path in files:
        memo.state(str(path))
    memo.keep()
    kept = json.loads((tmp_path / "files.json").read_text())["files"]
    assert list(kept) == [str(path) for path in files[3:]]


def test_a_damaged_entry_can_go_too(plain: Toy, tmp_path: Path) -> None:
    _, cache = plain.copy(tmp_path)
    (directory,) = entries(cache)
    (directory / "entry.json").write_text("{")
    assert [build.name for build in stored(Cache(cache))] == [""]
    assert len(prune(Cache(cache), max_size=0).removed) == 1
    assert not directory.exists()


def test_a_cache_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert prune(Cache(tmp_path / "none"), max_size=0).removed == []
    assert not (tmp_path / "none").exists()


def test_negative_limits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_size: -1 is negative"):
        prune(Cache(tmp_path), max_size=-1)


@pytest.mark.parametrize("in_use", [False, True])
def test_a_build_makes_room_for_itself(
    three: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_use: bool
) -> None:
    cache, directories = three
    size = stored(Cache(cache))[0].size
    monkeypatch.setenv("JITQUANT_CACHE_MAX_SIZE", str(3 * size + size // 2))
    held = hold(next(directories[0].glob("*.so"))) if in_use else None
    loader = new_loader(cache)
    lines: list[str] = []
    loader.reporter.say = lines.append  # type: ignore[method-assign]
    source = tmp_path / "more" / "more.cpp"
    source.parent.mkdir()
    source.write_text('extern "C" int more() { return 1; }\n')
    build = loader.ensure(Request("more", (source,)))
    gone = directories[1] if in_use else directories[0]
    assert set(entries(cache)) == {*directories, build.library.parent} - {gone}
    assert lines[-1].startswith("removed plain from the cache, unused for longest: it may have ")
    if held is not None:
        held.release()


def test_a_build_that_is_larger_than_the_limit_is_used(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITQUANT_CACHE_MAX_SIZE", "0")
    loader = new_loader(tmp_path / "cache")
    assert loader.get("plain", [plain.source]).library.factor() == 3
    assert len(entries(tmp_path / "cache")) == 1


def test_the_default_limit_and_none(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    monkeypatch.setattr(builder, "trim", lambda cache, limit: limits.append(limit))
    source, cache = plain.copy(tmp_path)
    for number, chosen in ((4, ""), (5, "inf"), (6, "1.5g")):
        monkeypatch.setenv("JITQUANT_CACHE_MAX_SIZE", chosen)
        source.with_suffix(".h").write_text(f"#define FACTOR {number}\n")
        new_loader(cache).ensure(Request("plain", (source,)))
    assert limits == [4 << 30, 3 << 29]
