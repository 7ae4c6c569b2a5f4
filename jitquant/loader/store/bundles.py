"""Bundles: builds in a directory, for machines without a compiler.

Layout::

    manifest.json                                what is in it, and what it was built for
    entries/<level-1 key>/<level-2 key>/         as in the cache: entry.json and the library

Users of a bundle never write to it. ``JITQUANT_BUNDLES`` lists the directories to search.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import BundleError
from ..machine.archs import runs_on
from ..machine.memo import Memo
from ..machine.torch_install import OLDEST_TORCH
from ..machine.trust import others_write
from ..request.key import SCHEMA
from ..request.plan import Wanted
from ..request.sources import Watched
from ..units import release
from .cache import BUNDLES, Entry
from .changes import LABELS, plain
from .hold import Hold, hold
from .match import Build, match_entry

MANIFEST = "manifest.json"
#: Incremented when older versions of jitquant cannot read the format of newer ones.
FORMAT = 1
_PLACE = re.compile(r"entries/[0-9a-f]{32}/[0-9a-f]{32}")
_FILE = re.compile(r"\w+\.so")

_STABLE = ">= " + ".".join(map(str, OLDEST_TORCH))

#: What has to be equal, apart from what is compared on its own.
_EQUAL = (
    *("torch", "machine", "cpu", "cuda_flags", "cxx_flags", "debug"),
    *("include_dirs", "layout", "binding_generator"),
)


@dataclass(frozen=True)
class Bundled:
    """One build in a bundle, as the manifest lists it; ``directory`` is relative to the bundle."""

    name: str
    archs: list[str]
    directory: str
    library: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk."""

    path: Path
    builds: tuple[Bundled, ...]


def open_bundle(path: Path) -> Bundle:
    """The bundle in the directory ``path``."""
    try:
        refused = _writable(path) or _writable(path / MANIFEST)
        text = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise BundleError(
            f"{path} is not a bundle: {error.strerror} ({error.filename}). Make one with "
            f"`jitquant bundle -o {path}`, or take it out of {BUNDLES}."
        ) from error
    if refused:
        raise BundleError(refused)
    try:
        manifest = json.loads(text)
        version = manifest["format"]
        if version != FORMAT:
            raise BundleError(
                f"{path} has format {version}, and this jitquant reads format {FORMAT}. Make it "
                "again with this version (`jitquant bundle`)."
            )
        builds = tuple(Bundled(**build) for build in manifest["builds"])
        for build in builds:
            if not (_PLACE.fullmatch(build.directory) and _FILE.fullmatch(build.library)):
                raise ValueError(f"{build.directory}/{build.library} is outside the bundle")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BundleError(
            f"{path / MANIFEST} cannot be read ({error}). Make the bundle again."
        ) from error
    return Bundle(path, builds)


def fits(wanted: Wanted, memo: Memo, entry: Entry) -> Watched | str:
    """What to watch if ``entry`` matches the request, otherwise why it does not."""
    reasons: list[str] = []
    had: dict[str, Any] = entry.inputs
    here = wanted.inputs
    for key in _EQUAL:
        label = LABELS[key]
        if key == "torch" and entry.stable_abi:
            if release(here[key]) < OLDEST_TORCH:
                reasons.append(f"{label}: built for {_STABLE}, here {here[key]}")
        elif had.get(key) != here.get(key):
            reasons.append(f"{label}: built for {plain(had.get(key))}, here {plain(here.get(key))}")
    if not _libc_runs(had["libc"], here["libc"]):
        reasons.append(f"the C library: built with {had['libc']}, here {here['libc']}")
    if [name for name, _ in had["sources"]] != [name for name, _ in here["sources"]]:
        reasons.append("it was built from other sources")
    else:
        pairs = zip(had["sources"], here["sources"], strict=True)
        reasons += [f"{new[0]} is not what it was built from" for old, new in pairs if old != new]
    lacking = [arch for arch in here["archs"] if not any(runs_on(a, arch) for a in had["archs"])]
    if lacking:
        reasons.append(f"it holds {_archs(had['archs'])}, and {_archs(lacking)} is asked for")
    if reasons:
        return "; ".join(reasons)
    match = match_entry(wanted, memo, entry, installed=False)
    return f"{match} is not what it was built with" if isinstance(match, str) else match


def _writable(place: Path) -> str:
    """Why a file or directory is rejected, if others could have written to it."""
    why = others_write(os.stat(place))
    return f"{place} {why}. Run `chmod go-w {place}` if nobody did." if why else ""


def open_library(directory: Path, entry: Entry) -> Hold | None:
    """The open library of a build, if it still has the digest from its build."""
    with contextlib.suppress(OSError):
        held = hold(directory / entry.library)
        if held is not None and held.sha256() == entry.library_sha256:
            return held
    return None


def search(paths: Iterable[Path], wanted: Wanted, memo: Memo) -> tuple[Build | None, list[str]]:
    """The requested build in the bundles at ``paths``, and why other builds do not fit."""
    refused: list[str] = []
    for path in paths:
        try:
            bundle = open_bundle(path)
        except BundleError as error:
            refused.append(str(error))
            continue
        for build in bundle.builds:
            if build.name == wanted.name:
                try:
                    return _open(path, build, wanted, memo), refused
                except BundleError as error:
                    refused.append(str(error))
    return None, refused


def _open(path: Path, build: Bundled, wanted: Wanted, memo: Memo) -> Build:
    """A build in the bundle at ``path``."""
    directory = path / build.directory
    described = directory / "entry.json"
    places = (directory.parent.parent, directory.parent, directory, described)
    try:
        if why := next(filter(None, map(_writable, (*places, directory / build.library))), ""):
            raise BundleError(why)
        entry = Entry.from_json(described.read_bytes())
    except (OSError, ValueError) as error:
        raise BundleError(f"{described} cannot be read ({error})") from error
    if entry.schema != SCHEMA or entry.level2[:32] != directory.name:
        raise BundleError(f"{described} does not hash to its own name")
    if (entry.library, entry.library_sha256) != (build.library, build.sha256):
        raise BundleError(f"{described} is not what the manifest speaks of")
    match = fits(wanted, memo, entry)
    if isinstance(match, str):
        raise BundleError(f"{path}: {wanted.name}: {match}")
    held = open_library(directory, entry)
    if held is None:
        raise BundleError(f"{directory / entry.library} does not have the digest it was built with")
    return Build(entry, directory / entry.library, match, held)


def check_free(directory: Path) -> None:
    """Reject a directory for a bundle that is not empty or cannot be made."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(
            f"bundle: {directory} already exists. Remove it, or give another directory."
        )
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=directory.parent))
    except OSError as error:
        raise ValueError(
            f"bundle: {directory} cannot be made ({error.strerror}). Give another directory."
        ) from error


def write_bundle(builds: Sequence[tuple[Path, Entry]], directory: Path) -> Bundle:
    """Copy ``builds`` (directory and entry of each) to a new bundle, which appears atomically.

    Raises:
        ValueError: ``builds`` is empty, or ``directory`` is not empty or cannot be made.
        OSError: a file cannot be written.
    """
    if not builds:
        raise ValueError("bundle: there are no builds to put into it.")
    check_free(directory)
    directory = Path(os.path.abspath(directory))
    staging = directory.with_name(f".{directory.name}-{os.getpid()}-{os.urandom(4).hex()}")
    staging.mkdir(mode=0o755)
    try:
        listed: list[Bundled] = []
        for source, entry in builds:
            place = Path("entries", entry.level1[:32], entry.level2[:32])
            target = staging / place
            if target.is_dir():
                continue
            target.mkdir(parents=True)
            for name in ("entry.json", entry.library):
                shutil.copyfile(source / name, target / name)
                (target / name).chmod(0o444)
            copied = open_library(target, entry)
            if copied is None:
                raise OSError(f"{source / entry.library} changed while it was copied")
            copied.release()
            listed.append(
                Bundled(
                    entry.name,
                    list(entry.inputs["archs"]),
                    place.as_posix(),
                    entry.library,
                    entry.library_size,
                    entry.library_sha256,
                )
            )
        inputs = builds[0][1].inputs
        manifest = {
            "format": FORMAT,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **{key: inputs[key] for key in ("machine", "libc", "nvcc")},
            "torch": _STABLE if all(entry.stable_abi for _, entry in builds) else inputs["torch"],
            "builds": [asdict(build) for build in listed],
        }
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        (staging / MANIFEST).chmod(0o444)
        for place in (staging, *staging.rglob("*/")):
            if place.is_dir():
                place.chmod(0o755)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Bundle(directory, tuple(listed))


def _libc_runs(built: str, here: str) -> bool:
    """Whether a library linked with one C library runs with another: same kind, not older."""
    (name, _, version), (other, _, present) = built.partition("-"), here.partition("-")
    return name == other and _numbers(version) <= _numbers(present)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def _archs(names: Sequence[str]) -> str:
    return ", ".join(f"sm_{name}" for name in names) or "no GPU code"
