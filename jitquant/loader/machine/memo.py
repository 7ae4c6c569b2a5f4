"""What is known of files until they change: their digests, and what compilers answered."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .trust import read_trusted, write_trusted

#: Below this many nanoseconds between a change and its hashing a second change could go unseen.
_RACY_NS = 100_000_000
_RACY_COARSE_NS = 2_100_000_000
#: Files whose digests are kept: before more are, those that are gone are dropped, then the oldest.
_MOST_KEPT = 10_000
_MOST_NOTES = 256

Signature = tuple[int, int, int, int]


class FileState(NamedTuple):
    """Digest of a file, with a ``stat`` signature to detect changes.

    ``signature`` is ``None`` while the file is so new that another change could have the same
    signature; then it is read again.
    """

    digest: str
    signature: Signature | None


def signature_of(status: os.stat_result) -> Signature:
    """The fields of a ``stat`` that change whenever the file does."""
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


def settled(status: os.stat_result, now_ns: int) -> bool:
    """Whether a change after ``now_ns`` would change the signature of ``status``."""
    # A date in the future was chosen, at the time of the other.
    modified = status.st_mtime_ns if status.st_mtime_ns <= now_ns else 0
    latest = max(modified, status.st_ctime_ns)
    window = _RACY_COARSE_NS if latest % 1_000_000_000 == 0 else _RACY_NS
    return latest < now_ns - window


def _has_no_ctime(signature: Signature) -> bool:
    """Whether a file may be in an image such as squashfs, which keeps one date for both.

    In another image, mounted in its place, another file may have the same signature.
    """
    modified, changed, *_ = signature
    return modified == changed and changed % 1_000_000_000 == 0


class Memo:
    """SHA-256 of files, and notes about files, while their ``stat`` stays the same.

    A build reads hundreds of headers, mostly of compilers and toolkits, and a compiler takes tens
    of milliseconds to say its version. So all of it is also stored in the directory that
    :meth:`attach` names, for the next process.
    """

    def __init__(self) -> None:
        self._known: dict[str, FileState] = {}
        self._own: set[str] = set()
        self._notes: dict[str, str] = {}
        self._file: Path | None = None
        self._kept: _Kept | None = None
        self._learned = False

    def attach(self, directory: Path | None) -> None:
        """Store what is learned in ``directory`` from now on."""
        if directory is not None and (self._file is None or self._file.parent != directory):
            self._file, self._kept, self._learned = directory / "files.json", None, False

    def state(self, path: str, *, own: bool = False) -> FileState | None:
        """The state of ``path``, or ``None`` if it is not a regular file.

        Args:
            own: whether it is the caller's or the project's: then its digest is not for the next
                process if it has no ctime of its own.
        """
        if own:
            self._own.add(path)
        try:
            status = os.stat(path)
            signature = signature_of(status)
            known = self._known.get(path)
            if known is None and (kept := self._from_file().files.get(path)):
                digest, _, rest = kept.partition(" ")
                if rest == _written(signature):
                    known = self._known[path] = FileState(digest, signature)
            if known is not None and known.signature == signature:
                return known
            fresh = self._known[path] = self._hash(path)
        except OSError:
            self._known.pop(path, None)
            return None
        self._learned = self._learned or fresh.signature is not None
        return fresh

    def signature(self, path: str) -> Signature | None:
        """The signature of ``path`` if a change of it would be seen. Does not read it."""
        with contextlib.suppress(OSError):
            now, status = time.time_ns(), os.stat(path)
            return signature_of(status) if settled(status, now) else None
        return None

    def _hash(self, path: str) -> FileState:
        now = time.time_ns()
        with open(path, "rb") as stream:
            before = os.fstat(stream.fileno())
            digest = hashlib.sha256(stream.read()).hexdigest()
        return FileState(digest, signature_of(before) if settled(before, now) else None)

    def note(self, key: str, files: Mapping[str, Signature | None], text: str = "") -> None:
        """Note ``text`` while ``files`` stay as they are, if a change of each would be seen."""
        if None not in files.values():
            self._notes[key] = _written_note(text, files)
            self._learned = True

    def recall(self, key: str) -> tuple[str, dict[str, Signature]] | None:
        """What was noted under ``key``, and the files, if these are as they were."""
        noted = self._notes.get(key) or self._from_file().notes.get(key, "")
        text, *rest = noted.split("\0")
        files = {path: _now(path) for path in rest[1::2]}
        return (text, files) if files and _written_note(text, files) == noted else None

    def answer(
        self, question: str, ask: Callable[[], tuple[dict[str, Any], list[str]]]
    ) -> dict[str, Any]:
        """The answer to ``question``. ``ask`` returns it, and the files it depends on.

        Without such files it is not kept: why a program failed may pass.
        """
        if recalled := self.recall(question):
            return dict(json.loads(recalled[0]))
        answer, files = ask()
        if files:
            self.note(question, {path: _now(path) for path in files}, json.dumps(answer))
        return answer

    def _from_file(self) -> _Kept:
        if self._kept is None:
            self._kept = _Kept({}, {})
            if self._file is not None:
                with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
                    self._kept = _Kept.from_json(read_trusted(self._file))
        return self._kept

    def keep(self) -> None:
        """Store what is new since the last time."""
        if self._file is None or not self._learned:
            return
        self._learned = False
        self._kept = None
        files, notes = self._from_file()  # and what other processes have learned meanwhile
        for path, (digest, signature) in list(self._known.items()):
            if signature is None or (path in self._own and _has_no_ctime(signature)):
                continue
            files[path] = f"{digest} {_written(signature)}"
        notes.update(self._notes)
        if len(files) > _MOST_KEPT:
            there = [(path, state) for path, state in files.items() if os.path.exists(path)]
            files = dict(there[-_MOST_KEPT:])
        self._kept = _Kept(files, dict(list(notes.items())[-_MOST_NOTES:]))
        text = json.dumps(self._kept._asdict(), separators=(",", ":"))
        write_trusted(self._file, text.encode())


class _Kept(NamedTuple):
    """What is stored, by path and by key.

    Only strings, because thousands of tuples would trigger the garbage collector.
    """

    files: dict[str, str]
    notes: dict[str, str]

    @classmethod
    def from_json(cls, text: bytes) -> _Kept:
        """What ``text`` says is stored.

        Raises:
            TypeError: it says something else; or ValueError or RecursionError.
        """
        kept = cls(**json.loads(text))
        for part in kept:
            if not isinstance(part, dict) or not all(isinstance(s, str) for s in part.values()):
                raise TypeError("not a table of strings")
        return kept


def _now(path: str) -> Signature:
    try:
        return signature_of(os.stat(path))
    except OSError:
        return (0, 0, 0, 0)


def _written(signature: Signature) -> str:
    return " ".join(map(str, signature))


def _written_note(text: str, files: Mapping[str, Signature | None]) -> str:
    return "\0".join([text, *(f"{_written(s)}\0{path}" for path, s in files.items() if s)])
