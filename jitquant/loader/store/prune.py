"""Lists and shrinks the cache, without removing anything that a live process uses."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import CacheError, LockTimeoutError
from .cache import Cache, Entry, remove, staged_by_this_machine
from .hold import unused

_A_MOMENT = 0.05
#: What is kept beside builds: notes of last builds, logs, sources that were given as text, answers
#: of compilers and the objects that modules share. All of it is made again when it is needed.
_OTHERS = ("last", "logs", "texts", "toolchain")
#: Of what builds may take, and what was used just now stays.
_SHARE_OF_OTHERS = 8
_JUST_NOW_SECONDS = 600.0


@dataclass(frozen=True)
class Stored:
    """One build in the cache.

    Attributes:
        name: the module's; ``""`` for an entry that cannot be read.
        size: bytes of its files.
        used: when it was built or last loaded, in seconds since the epoch.
        in_use: whether a live process has it loaded, or that cannot be told.
    """

    name: str
    archs: list[str]
    directory: Path
    size: int
    used: float
    in_use: bool = False


@dataclass(frozen=True)
class Pruned:
    """What was removed, and what was kept because a live process uses it."""

    removed: list[Stored]
    in_use: list[Stored]
    size_before: int
    size_after: int


def stored(cache: Cache) -> list[Stored]:
    """The builds in ``cache``, the least recently used first."""
    return sorted(map(_stored, _places(cache)), key=lambda build: build.used)


def prune(cache: Cache, *, max_size: int | None = None, older_than: float | None = None) -> Pruned:
    """Remove builds: those not used for ``older_than`` seconds, then the least recently used ones.

    Builds that a live process has loaded stay. Leftovers of dead builders are removed too.

    Args:
        max_size: bytes that the builds may take together; the rest may take an eighth of that.
        older_than: seconds since a build was last loaded.

    Raises:
        CacheError: the directory cannot be trusted or written to.
        ValueError: a limit is negative.
    """
    for name, value in (("max_size", max_size), ("older_than", older_than)):
        if value is not None and value < 0:
            raise ValueError(f"{name}: {value} is negative.")
    if not cache.check():
        return Pruned([], [], 0, 0)
    places = [path for path in (cache.base / "entries", cache.base / "staging") if path.is_dir()]
    if not all(os.access(path, os.W_OK | os.X_OK) for path in places):  # nothing can be moved
        raise CacheError(
            f"cache directory {cache.root} cannot be written to by uid {os.geteuid()} (it is "
            "read-only, or another user's): nothing was removed. Run this as its owner, where it "
            "can be written to."
        )
    _sweep(cache)
    if max_size is not None:
        _trim_others(cache, max_size // _SHARE_OF_OTHERS)
    builds = stored(cache)
    before = left = sum(build.size for build in builds)
    now = time.time()
    removed: list[Stored] = []
    kept: list[Stored] = []
    for build in builds:
        too_old = older_than is not None and now - build.used > older_than
        too_much = max_size is not None and left > max_size
        if not (too_old or too_much):
            continue
        if _remove(cache, build):
            removed.append(build)
            left -= build.size
        else:
            kept.append(build)
    return Pruned(removed, kept, before, left)


def trim(cache: Cache, limit: int) -> Pruned | None:
    """As :func:`prune` to ``limit`` bytes. Returns ``None`` right away if builds are smaller."""
    _trim_others(cache, limit // _SHARE_OF_OTHERS)
    files = (item for place in _places(cache) for item in _scan(place))
    return prune(cache, max_size=limit) if sum(map(_size, files)) > limit else None


def clear(cache: Cache) -> Pruned:
    """Remove every build that no live process has loaded, and other cached data."""
    pruned = prune(cache, max_size=0)
    for subdirectory in _OTHERS:
        for item in _scan(cache.base / subdirectory):
            remove(Path(item.path))
    return pruned


def _places(cache: Cache) -> list[Path]:
    """The directories of builds."""
    groups = _scan(cache.base / "entries")
    return [Path(place.path) for group in groups for place in _scan(Path(group.path))]


def _trim_others(cache: Cache, limit: int) -> None:
    """Remove what is kept beside builds and was not used for longest, until it fits."""
    items = [item for name in _OTHERS for item in _scan(cache.base / name)]
    sizes = {item.path: sum(map(_size, _files(item))) for item in items}
    left, now = sum(sizes.values()), time.time()
    for used, path in sorted((_used(Path(item.path)), item.path) for item in items):
        if left <= limit or now - used < _JUST_NOW_SECONDS:
            return
        remove(Path(path))
        left -= sizes[path]


def _files(item: os.DirEntry[str]) -> list[os.DirEntry[str]]:
    return _scan(Path(item.path)) if item.is_dir(follow_symlinks=False) else [item]


def _stored(directory: Path) -> Stored:
    name, archs, in_use = "", [], False
    size = sum(map(_size, _scan(directory)))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        entry = Entry.from_json((directory / "entry.json").read_bytes())
        name, archs = entry.name, list(entry.inputs["archs"])
        with unused(directory / entry.library) as free:
            in_use = not free
    return Stored(name, archs, directory, size, _used(directory), in_use)


def _used(path: Path) -> float:
    with contextlib.suppress(OSError):  # just removed
        return path.stat().st_mtime
    return 0.0


def _size(item: os.DirEntry[str]) -> int:
    with contextlib.suppress(OSError):  # just removed
        return item.stat().st_size
    return 0


def _remove(cache: Cache, build: Stored) -> bool:
    """Remove a build by one rename, with its files locked so that nobody loads it meanwhile."""
    files = [Path(item.path) for item in _scan(build.directory) if item.name != "entry.json"]
    aside = cache.base / "staging" / f"pruned-{os.urandom(6).hex()}"
    with contextlib.ExitStack() as stack:
        if not all(stack.enter_context(unused(file)) for file in files):
            return False
        try:
            os.rename(build.directory, aside)
        except OSError:
            return False
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):  # it has other builds
        build.directory.parent.rmdir()
    return True


def _sweep(cache: Cache) -> None:
    """Remove leftovers of dead builders: nobody holds the lock of their build."""
    shards: set[str] = set()
    for item in _scan(cache.base / "staging"):
        shard = item.name.partition("@")[0]
        if item.name.startswith(("pruned-", "damaged-")):  # an interrupted removal
            shutil.rmtree(item.path, ignore_errors=True)
        elif item.name.startswith(staged_by_this_machine(shard)):
            shards.add(shard)
    cache.sweep(None)
    for shard in sorted(shards):
        lock = cache.lock(shard, timeout=_A_MOMENT, beat=_A_MOMENT, on_wait=lambda *_: None)
        with contextlib.suppress(LockTimeoutError), lock as locked:  # it is not free
            if locked:
                cache.sweep(shard)


def _scan(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as items:
            return list(items)
    except OSError:
        return []
