"""C++ that tests compile for the CPU: objects are kept between runs, by what they were made from.

An object belongs to a compiler, its arguments, and the content of every file that it read. Several
processes may ask for the same one; the first compiles it and the others wait.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

ROOT = Path(__file__).parents[1]
KEPT_DAYS = 14
FLAGS = ("-std=c++17", "-fPIC", "-ffp-contract=off")


def compiler() -> list[str]:
    """The C++ compiler and the arguments that CXX has for it."""
    return os.environ.get("CXX", "c++").split()


def link(objects: Iterable[Path], library: Path, *arguments: str | Path) -> Path:
    """A shared library of ``objects``; returns its path."""
    command = [*compiler(), "-shared", *objects, *arguments, "-o", library]
    _run([str(word) for word in command])
    return library


def compiled(arguments: Sequence[str | Path], folder: Path | None = None) -> Path:
    """The object that the compiler makes of ``arguments``, which name one source.

    Args:
        arguments: of the compiler beside `FLAGS`.
        folder: where objects are kept; by default one in the user's cache.
    """
    words = [str(argument).replace(f"{ROOT}/", "") for argument in arguments]
    made_by = [*compiler(), *FLAGS, *words]
    command = _digest("\0".join((_version(tuple(compiler())), *made_by)).encode())
    place = (folder or _kept()) / command
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / "lock"):
        return _stored(place) or _compile(made_by, place)


def _compile(command: list[str], place: Path) -> Path:
    while True:
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            out, depfile = Path(scratch) / "o", Path(scratch) / "d"
            started = time.time()
            more = ["-c", "-MMD", "-MF", str(depfile), "-MT", "o", "-o", str(out)]
            _run([*command, *more])
            rule = depfile.read_text().replace("\\\n", " ").partition(":")[2]
            files = {name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", rule.strip())}
            names = "\n".join(sorted(files))
            if any(started <= (ROOT / name).stat().st_mtime <= time.time() for name in files):
                continue  # edited in the meantime: the object may be of either content
            (Path(scratch) / "n").write_text(names)
            content = out.read_bytes()
            target = place / f"{_content(names)}-{_digest(content)}.o"
            (Path(scratch) / "n").replace(place / f"{_digest(names.encode())}.files")
            return out.replace(target)


def _run(command: list[str]) -> None:
    """Runs a compiler.

    Raises:
        RuntimeError: it failed; the first line is its first error.
    """
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    first = re.search(r"^.*\berror: .*$|undefined reference.*$", done.stderr, re.MULTILINE)
    said = first[0] if first else f"{command[0]} ended with exit code {done.returncode}"
    raise RuntimeError(f"{said}\n{shlex.join(command)}\n{done.stderr[-4000:]}")


def _stored(place: Path) -> Path | None:
    """The object of the files as they are now."""
    for listed in place.glob("*.files"):
        for found in place.glob(f"{_content(listed.read_text())}-*.o"):
            if found.stem.split("-")[1] == _digest(found.read_bytes()):
                os.utime(found)
                return found
            found.unlink()
    return None


def _content(names: str) -> str:
    """Digest of the files and their names; of one that is gone, no file's content."""
    parts = []
    for name in names.splitlines():
        path = ROOT / name
        parts.append(f"{name} {_digest(path.read_bytes()) if path.is_file() else '-'}")
    return _digest("\n".join(parts).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    done = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True)
    return done.stdout


@functools.cache
def _kept() -> Path:
    """The folder in the user's cache, without what was not used for long."""
    folder = user_cache_path("jitquant-tests", appauthor=False) / "objects"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        own = Path(tempfile.mkdtemp(prefix="jitquant-objects-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return own
    for path in folder.glob("*/*.o"):
        if path.stat().st_mtime < time.time() - KEPT_DAYS * 86400:
            path.unlink(missing_ok=True)
    return folder
