"""Sources passed as text: files in the cache, named after their contents."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ..request.sources import Source
from .cache import Cache


def source_files(
    name: str, sources: Sequence[object], cache: Callable[[], Cache]
) -> tuple[object, ...]:
    """``sources`` with each text replaced by a file, ``<name>.cu`` in a directory per digest."""
    if not any(isinstance(source, Source) for source in sources):
        return tuple(sources)
    place = cache()
    if not place.prepare():
        place = place.temporary()
    found: list[object] = []
    for source in sources:
        if isinstance(source, Source):
            number = sum(isinstance(path, Path) and path.suffix == source.suffix for path in found)
            file_name = f"{name}{number or ''}{source.suffix}"
            found.append(_file(place, source.text, file_name))
        else:
            found.append(source)
    return tuple(found)


def _file(cache: Cache, text: str, file_name: str) -> Path:
    contents = text.encode()
    directory = cache.base / "texts" / hashlib.sha256(contents).hexdigest()[:32]
    path = directory / file_name
    with contextlib.suppress(OSError):
        if path.read_bytes() == contents:
            os.utime(directory)  # it is in use
            return path
    fresh = directory / f"{file_name}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
    try:
        cache.make_directory(directory)
        fresh.write_bytes(contents)
        fresh.rename(path)
    except OSError as error:
        raise cache.explain_os_error(error) from error
    return path
