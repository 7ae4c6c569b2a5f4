"""The cache directory: entries, staging, locks, logs.

Layout below ``<cache>/v1``::

    entries/<level-1 key>/<level-2 key>/entry.json   what the build depends on, and its digests
                                       /<name>.so
    staging/     a private directory for each build in progress; an entry is published by rename
    locks/       kernel locks (flock), taken on a miss only, and who holds them
    last/        for each module name, the inputs of its last build
    logs/        full output of failed compilers, the newest ones
    texts/       sources passed as text
    toolchain/   versions of compilers, digests of files, objects that modules share
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import json
import os
import shutil
import socket
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import (
    CacheError,
    DamagedEntryError,
    DamagedEntryWarning,
    LoaderError,
    LockTimeoutError,
)
from ..machine.scratch import new_scratch
from ..machine.trust import GROUP, doubt, others_write, shared_group, write_trusted
from ..report import outside
from ..request.includes import Searched
from ..request.key import SCHEMA, digest_of
from .hold import Hold, hold, is_lockable

#: Incremented when the directory layout changes.
_LAYOUT = "v1"
_SUBDIRECTORIES = ("entries", "staging", "locks", "last", "logs", "texts", "toolchain")
#: A directory instead of a file, or the other way round.
_MISPLACED = (NotADirectoryError, IsADirectoryError)
_KEPT_LOGS = 40
_STALE_SECONDS = 24 * 3600.0
_ATTEMPTS = 3


#: The variable that lists directories with builds made elsewhere.
BUNDLES = "JITQUANT_BUNDLES"


@dataclass
class Entry:
    """One published build: its inputs and outputs.

    ``inputs`` is the level-1 key in readable form, ``headers`` maps the name of each file read to
    its digest, ``searched`` says where else each name was searched, and ``visible`` lists files
    that existed there but were not read. ``ops`` are the operators that loading registers,
    ``stable_abi`` is whether it runs with every torch from ``OLDEST_TORCH`` on.
    """

    name: str
    extension: str
    level1: str
    inputs: dict[str, Any]
    headers: dict[str, str]
    searched: list[Searched]
    visible: list[str]
    python_abi: str | None
    library_sha256: str
    library_size: int
    ops: list[str]
    init_symbols: list[str]
    stable_abi: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    @functools.cached_property
    def level2(self) -> str:
        """The final key: level 1 and everything else that the compiler read."""
        return digest_of(
            [self.schema, self.level1, self.headers, self.searched, self.visible, self.python_abi]
        )

    @property
    def library(self) -> str:
        """File name of the shared library."""
        return f"{self.extension}.so"

    @property
    def record(self) -> dict[str, Any]:
        """What is remembered of the last build of a module."""
        names = ("level1", "inputs", "headers", "info")
        return {name: getattr(self, name) for name in names}

    def to_json(self) -> str:
        """The text of ``entry.json``."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: bytes) -> Entry:
        """The entry that ``text`` describes.

        Raises:
            ValueError: it describes none.
        """
        try:
            entry = cls(**json.loads(text))
            entry.searched = [Searched(*one) for one in entry.searched]
            _check_record(entry.record)
            _check_strings([entry.extension, *entry.ops, *entry.init_symbols])
        except (TypeError, AttributeError, LookupError, RecursionError) as error:
            raise ValueError(str(error)) from None
        return entry


def _check_record(record: Mapping[str, Any]) -> None:
    """Reject a record that no build has written, since its parts are used as they are.

    Raises:
        ValueError: it is damaged, or somebody has edited it; or TypeError or AttributeError.
    """
    inputs, headers, info = record["inputs"], record["headers"], record["info"]
    if record.get("level1", "") not in ("", digest_of(inputs)):  # earlier versions left it out
        raise ValueError("its inputs do not hash to its key")
    _check_strings([*headers.values(), *info.get("sources", ()), *info.get("include_dirs", ())])
    took = [seconds for _, seconds in info.get("steps", ())]
    if not all(isinstance(n, int | float) for n in (info["seconds"], info["built"], *took)):
        raise ValueError("its times are not numbers")


def _check_strings(values: list[object]) -> None:
    if not all(isinstance(value, str) for value in values):
        raise ValueError("not all of its names are strings")


def default_root() -> Path:
    """``JITQUANT_CACHE_DIR``, else the user's cache directory of the platform.

    Raises:
        CacheError: the user has no home directory.
    """
    if chosen := os.environ.get("JITQUANT_CACHE_DIR"):
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    from platformdirs import user_cache_dir

    try:
        return Path(user_cache_dir("jitquant", appauthor=False))
    except RuntimeError as error:
        raise CacheError(
            f"there is no directory for the cache: {error}. {_CHOOSE_ANOTHER}"
        ) from None


def bundle_paths() -> list[Path]:
    """The directories that ``JITQUANT_BUNDLES`` lists, separated by ``:``."""
    given = os.environ.get(BUNDLES, "").split(os.pathsep)
    return [Path(os.path.abspath(os.path.expanduser(part))) for part in given if part]


class Cache:
    """One cache directory. Nothing is created before the first miss."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = root / _LAYOUT
        self._group: int | None = None
        self._temporary: Cache | None = None
        self._directories = (root, self.base, *(self.base / sub for sub in _SUBDIRECTORIES))

    # -- the directory itself ------------------------------------------------------------------

    def distrust(self) -> str:
        """Why nothing may be loaded from here, and how to fix it; ``""`` if it may."""
        self._group = shared_group()
        for directory in self._directories:
            try:
                status = os.stat(directory)
            except OSError:
                continue
            if why := doubt(status, self._group):
                way_out = _CHOOSE_ANOTHER
                if others_write(status):
                    way_out = (
                        f"Run `chmod -R go-w {self.root}` if nobody did, remove it if that is not "
                        f"sure, or name its group in {GROUP} if you trust all its members."
                    )
                return f"cache directory {directory} {why}. {way_out}"
        return ""

    def check(self) -> bool:
        """Whether the directory exists. Rejects one that others can write to.

        Raises:
            CacheError: not a directory, of another owner, writable by others, or not readable.
            ValueError: ``JITQUANT_CACHE_GROUP`` names no group.
        """
        try:
            status = os.stat(self.root)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise CacheError(
                f"cache directory {self.root}: {error.strerror}. {_CHOOSE_ANOTHER}"
            ) from error
        if not stat.S_ISDIR(status.st_mode):
            raise CacheError(f"cache directory {self.root} is not a directory. {_CHOOSE_ANOTHER}")
        if why := self.distrust():
            raise CacheError(why)
        for directory in (self.root, self.base, self.base / "entries"):  # it may be of root
            try:
                os.scandir(directory).close()
            except FileNotFoundError:
                break
            except OSError as error:
                raise self.unreadable(directory, error) from error
        return True

    def prepare(self) -> bool:
        """Create what is missing; ``False`` if the directory is not writable."""
        try:
            if not self.check():
                self._group = shared_group()
                self.root.parent.mkdir(parents=True, exist_ok=True)
                self.make_directory(self.root)
                self.check()
            for directory in self._directories:
                if not directory.is_dir():
                    self.make_directory(directory)
            return all(os.access(self.base / sub, os.W_OK | os.X_OK) for sub in _SUBDIRECTORIES)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                return False
            raise self.explain_os_error(error) from error

    def make_directory(self, directory: Path) -> None:
        """Create a directory of the cache if it is missing: private, or of the sharing group."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
            self._give_mode(directory)

    def _give_mode(self, directory: Path) -> None:
        if self._group is not None:
            os.chown(directory, -1, self._group)
        os.chmod(directory, 0o700 if self._group is None else 0o2770)

    def explain_os_error(self, error: OSError) -> CacheError:
        """``error`` as an error about the cache directory, with how to fix it."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return CacheError(
                f"no space left for the build in {self.root} ({error.strerror}). Free some, or "
                "set JITQUANT_CACHE_DIR to a directory on another disk."
            )
        return CacheError(f"cache directory {self.root}: {error}. {_CHOOSE_ANOTHER}")

    def unreadable(self, path: Path, error: OSError) -> CacheError:
        """The error for a part of the cache that exists but cannot be read because of ``error``."""
        if error.errno in (errno.EACCES, errno.EPERM):
            way_out = (
                f"Run `chmod -R a+rX {self.root}` as its owner, or set JITQUANT_CACHE_DIR to a "
                "directory of your own."
            )
        else:
            way_out = "Ask again when that has passed, or set JITQUANT_CACHE_DIR to another disk."
        return CacheError(
            f"cache directory {self.root}: {path} cannot be read by uid {os.geteuid()} "
            f"({error.strerror}). {way_out}"
        )

    @property
    def memo_directory(self) -> Path | None:
        """Where answers of compilers are kept, if that exists."""
        path = self.base / "toolchain"
        return path if os.path.isdir(path) else None  # Path.is_dir() raises where it may not look

    @property
    def has_temporary(self) -> bool:
        """Whether this process uses a private cache instead of this one."""
        return self._temporary is not None

    def temporary(self) -> Cache:
        """A private cache for this process, used if this one is not writable."""
        if self._temporary is None or not self._temporary.root.is_dir():
            try:
                root = new_scratch("cache")[0]  # locked until this process ends
            except OSError as error:
                raise CacheError(
                    f"cache directory {self.root} cannot be written to, and neither can a "
                    f"temporary directory be made ({error}). Set JITQUANT_CACHE_DIR or TMPDIR to "
                    "a directory that can be written to."
                ) from error
            atexit.register(_remove_if_owner, root, os.getpid())
            self._temporary = Cache(root)
        self._temporary.prepare()
        return self._temporary

    # -- entries -------------------------------------------------------------------------------

    def candidates(self, level1: str) -> Iterator[tuple[Path, Entry]]:
        """The entries of a level-1 key; damaged ones are set aside on the way.

        Raises:
            CacheError: the system refuses to read what may well be good.
        """
        group = self.base / "entries" / level1[:32]
        try:
            if why := doubt(os.stat(group), self._group):
                self.set_aside(group, f"it {why}")
                return
            names = sorted(os.listdir(group))
        except FileNotFoundError:
            return
        except OSError as error:
            raise self.unreadable(group, error) from error
        for name in names:
            directory = group / name
            try:
                entry = self._read_entry(directory, level1)
            except FileNotFoundError:
                self.set_aside(directory, "its description is missing")
            except (*_MISPLACED, ValueError) as error:
                self.set_aside(directory, f"its description cannot be used ({error})")
            except OSError as error:
                raise self.unreadable(directory / "entry.json", error) from error
            else:
                yield directory, entry

    def _read_entry(self, directory: Path, level1: str) -> Entry:
        if why := doubt(os.stat(directory), self._group):
            raise ValueError(f"the directory {why}")
        with open(directory / "entry.json", "rb") as stream:
            if why := doubt(os.fstat(stream.fileno()), self._group):
                raise ValueError(f"it {why}")
            entry = Entry.from_json(stream.read())
        if entry.schema != SCHEMA or entry.level1 != level1:
            raise ValueError("it describes another build")
        if entry.level2[:32] != directory.name:
            raise ValueError("it does not hash to its own name")
        return entry

    def open_library(self, directory: Path, entry: Entry) -> Hold | None:
        """The library of an entry, held, if it still has the digest that it was published with.

        ``None`` if it does not, or is being removed. Load the open file itself, because its name
        may lead to another file by then.

        Raises:
            CacheError: the system refuses to read what may well be good.
        """
        path = directory / entry.library
        try:
            held = hold(path)
            if held is None:
                return None
            why = doubt(held.status(), self._group)
            if not why and held.sha256() != entry.library_sha256:
                why = "does not have the digest it was built with"
        except (FileNotFoundError, *_MISPLACED) as error:
            self.set_aside(directory, f"its library cannot be read ({error.strerror})")
            return None
        except OSError as error:
            raise self.unreadable(path, error) from error
        if why:
            held.release()
            self.set_aside(directory, f"its library {why}")
            return None
        with contextlib.suppress(OSError):
            os.utime(directory)
        return held

    def set_aside(self, directory: Path, why: str) -> None:
        """Move a damaged entry away, with a warning. One that was just removed is not damaged."""
        if not directory.exists():
            return
        warnings.warn(
            f"jitquant: cache entry {directory} is damaged: {why}; it is built again.",
            DamagedEntryWarning,
            stacklevel=outside(),
        )
        aside = self.base / "staging" / f"damaged-{os.urandom(6).hex()}"
        with contextlib.suppress(OSError):
            os.rename(directory, aside)
            shutil.rmtree(aside, ignore_errors=True)

    def publish(self, staged: Path, entry: Entry) -> tuple[Path, Entry, Hold]:
        """Publish a finished entry by one rename; an equal existing one is kept.

        It is held before it is published, so nobody can remove it before it is used. Returns its
        directory, the entry there, and the hold.

        Raises:
            CacheError: the file system refuses.
            DamagedEntryError: a damaged entry exists there and cannot be moved.
        """
        target = self.base / "entries" / entry.level1[:32] / entry.level2[:32]
        ours = None
        with contextlib.suppress(OSError):
            self._give_mode(staged)
            for path in staged.iterdir():
                path.chmod(0o644)  # whatever the umask
            ours = hold(staged / entry.library)
        if ours is None or ours.sha256() != entry.library_sha256:
            raise CacheError(
                f"cache directory {self.root}: the new build in it cannot be read. "
                f"{_CHOOSE_ANOTHER}"
            )
        for attempt in range(_ATTEMPTS):
            try:
                self.make_directory(target.parent)
                os.rename(staged, target)
            except OSError as error:
                # Whoever prunes may remove the parent, once empty, between these two steps.
                pruned = error.errno == errno.ENOENT and attempt + 1 < _ATTEMPTS
                if not pruned and error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise self.explain_os_error(error) from error
            else:
                return target, entry, ours
            for directory, other in self.candidates(entry.level1):
                if directory == target and (theirs := self.open_library(directory, other)):
                    ours.release()
                    shutil.rmtree(staged, ignore_errors=True)
                    return target, other, theirs
        raise DamagedEntryError(
            f"cache entry {target} is damaged and cannot be replaced; remove it by hand."
        )

    def remember_last(self, entry: Entry) -> None:
        """Store the inputs of a module's newest build, to report later what changed."""
        path = self.base / "last" / f"{entry.name}.json"
        write_trusted(path, json.dumps(entry.record).encode())

    def last(self, name: str) -> dict[str, Any] | None:
        """The inputs of a module's newest build, if they are known."""
        try:
            record: dict[str, Any] = json.loads((self.base / "last" / f"{name}.json").read_bytes())
            _check_record(record)
            dict(record["inputs"]["sources"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        return record

    # -- work in progress ----------------------------------------------------------------------

    @contextlib.contextmanager
    def staging(self, level1: str, locked: bool) -> Iterator[Path]:
        """A private directory for one build, removed at the end.

        Raises:
            CacheError: the disk fails, or somebody removes the directory during the build.
        """
        made = False
        prefix = staged_by_this_machine(level1 if locked else None)
        path = self.base / "staging" / f"{prefix}{os.getpid()}-{os.urandom(6).hex()}"
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)
            made = True
            yield path
        except (OSError, LoaderError) as error:
            if made and not path.exists():
                # What a compiler says then, if it says anything, leads nowhere.
                raise CacheError(
                    f"cache directory {self.root}: {path} was removed while a build was going on "
                    "in it. Build again, and remove builds with `jitquant cache clear`, which "
                    "leaves those in progress."
                ) from error
            if isinstance(error, LoaderError):
                raise
            raise self.explain_os_error(error) from error
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def sweep(self, level1: str | None) -> None:
        """Remove leftovers of dead builders.

        The holder of the lock of ``level1`` knows that earlier holders on this machine are gone.
        Locks of other machines may not be visible here (NFS with local locks), so their staging
        directories are removed only by age, as everything is if ``level1`` is ``None``.
        """
        staging = self.base / "staging"
        unfinished = (path for d in ("last", "toolchain") for path in (self.base / d).glob("*.tmp"))
        with contextlib.suppress(OSError):
            with tempfile.TemporaryFile(dir=staging) as new:
                now = os.fstat(new.fileno()).st_mtime  # by the clock that dates the others
            for path in (*staging.iterdir(), *unfinished):
                ours = level1 and path.name.startswith(staged_by_this_machine(level1))
                with contextlib.suppress(OSError):  # just removed
                    if ours or now - path.lstat().st_mtime > _STALE_SECONDS:
                        remove(path)

    def write_log(self, name: str, text: str) -> Path | None:
        """Store the output of a failed command, and remove the oldest logs."""
        directory = self.base / "logs"
        path = directory / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}.log"
        try:
            path.write_text(text, errors="replace")
            logs = sorted(directory.glob("*.log"), key=lambda p: p.stat().st_mtime)
            for old in logs[:-_KEPT_LOGS]:
                old.unlink(missing_ok=True)
        except OSError:
            return path if path.is_file() else None
        return path

    @contextlib.contextmanager
    def lock(
        self,
        level1: str,
        *,
        timeout: float,
        beat: float,
        on_wait: Callable[[str, float], None],
    ) -> Iterator[bool]:
        """Hold the build lock of a key; yields ``False`` on a file system without locks.

        The lock is the kernel's, so it ends with the process that holds it. ``on_wait`` is called
        every ``beat`` seconds with the holder and how long this process has waited. Without locks,
        two processes may build the same module. Both publish by rename, so that is only slower.

        Raises:
            LockTimeoutError: the lock was not free within ``timeout`` seconds.
            CacheError: the lock file cannot be made.
        """
        path = self.base / "locks" / f"{_shard(level1)}.lock"
        owner = path.with_suffix(".owner")
        if not self._flock_works(path):
            yield False
            return
        from filelock import FileLock, Timeout

        lock = FileLock(str(path), mode=self._lock_mode)
        started, waited = time.monotonic(), 0.0
        while True:
            try:
                lock.acquire(timeout=max(0.0, min(beat, timeout - waited)), poll_interval=0.05)
                break
            except Timeout:
                waited = time.monotonic() - started
                if waited >= timeout:
                    raise LockTimeoutError(
                        f"waited {waited:.0f} s for the build lock {path}, which is held by "
                        f"{_describe_owner(owner)}. Wait for it, stop it, or raise the limit with "
                        "JITQUANT_LOCK_TIMEOUT (seconds)."
                    ) from None
                on_wait(_describe_owner(owner), waited)
            except OSError as error:
                raise self.explain_os_error(error) from error
        me = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
        try:
            with contextlib.suppress(OSError):
                owner.write_text(json.dumps(me))
            yield True
        finally:
            with contextlib.suppress(OSError):
                owner.unlink()
            lock.release()

    @property
    def _lock_mode(self) -> int:
        return 0o600 if self._group is None else 0o660

    def builders(self) -> list[str]:
        """The holders of build locks, as far as this machine's kernel knows."""
        held: list[str] = []
        for path in sorted((self.base / "locks").glob("*.lock")):
            with contextlib.suppress(OSError), open(path, "rb") as stream:
                try:
                    fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    held.append(_describe_owner(path.with_suffix(".owner")))
        return held

    def _flock_works(self, path: Path) -> bool:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(PermissionError):  # made by another of the group
                os.fchmod(descriptor, self._lock_mode)
        except OSError as error:
            raise self.explain_os_error(error) from error
        return is_lockable(descriptor)


_CHOOSE_ANOTHER = "Set JITQUANT_CACHE_DIR to a directory of your own."


def _shard(level1: str) -> str:
    """Keys with the same first three digits share a lock, which bounds the number of locks."""
    return level1[:3]


def this_machine() -> str:
    """Identifies this machine until it reboots: its processes see each other's locks."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{socket.gethostname()}-{boot}"


def staged_by_this_machine(level1: str | None) -> str:
    """How the names of staging directories of this machine begin; ``None`` for those unlocked."""
    return f"{_shard(level1) if level1 else 'free'}@{this_machine()}-"


def _describe_owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_bytes())
        age = time.time() - float(owner["started"])
        return f"process {int(owner['pid'])} on {owner['host']} (for {max(age, 0.0):.0f} s)"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has not identified itself"


def remove(path: Path) -> None:
    """Remove a file or a directory, as far as possible."""
    shutil.rmtree(path, ignore_errors=True)  # which leaves a file, or a link, as it is
    with contextlib.suppress(OSError):
        path.unlink()


def _remove_if_owner(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
