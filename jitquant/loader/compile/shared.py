"""Objects that many modules are linked with, kept in the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..machine.memo import Memo
from ..machine.processes import Finished
from ..machine.trust import read_trusted, write_trusted
from ..request import includes, searches
from ..request.key import SCHEMA
from ..request.sources import Roots
from .ticks import changed_after, wait_for_next_tick


class Compiled(NamedTuple):
    """What the compiler of an object read; ``finished`` is its command if it ran just now."""

    unit: searches.Unit
    finished: Finished | None


class SharedObjects:
    """The objects in a directory of the cache, by what is known before they are compiled.

    An object is used if everything that its compiler read has the same digest, and would be found
    in the same place: as an entry of the cache.
    """

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._guard = threading.Lock()
        self._locks: dict[Path, threading.Lock] = {}

    def get(
        self, kept: Path, output: Path, roots: Roots, compile_it: Callable[[], Compiled]
    ) -> Compiled:
        """Write the object that is kept in ``kept`` to ``output``, compiled if need be.

        Threads that ask for the same object meanwhile wait for it.
        """
        with self._guard:
            lock = self._locks.setdefault(kept, threading.Lock())
        with lock:
            unit = self._read(kept, output)
            if unit is not None:
                return Compiled(unit, None)
            moment = wait_for_next_tick(output.parent)
            compiled = compile_it()
            if compiled.finished is not None and compiled.finished.returncode == 0:
                with contextlib.suppress(OSError):  # it is compiled again, then
                    self._keep(kept, output, roots, compiled.unit, moment)
            return compiled

    def _keep(
        self, kept: Path, output: Path, roots: Roots, unit: searches.Unit, moment: int
    ) -> None:
        """Keep the object, unless a file was changed while it was compiled."""
        searched, twins = searches.searched_by([unit], roots)
        read = (*unit.read, *unit.path.tools, *twins)
        states = {path: self._memo.state(path) for path in read}
        visible = includes.visible_now(searched, roots)
        content = output.read_bytes()
        described = {
            "schema": SCHEMA,
            "unit": unit,
            "digests": {path: state.digest for path, state in states.items() if state is not None},
            "labels": roots.labels,
            "searched": searched,
            "visible": visible.names,
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        if changed_after([*states, *visible.paths(roots)], moment, {}) is not None:
            return
        write_trusted(kept, json.dumps(described).encode() + b"\n" + content)

    def _read(self, kept: Path, output: Path) -> searches.Unit | None:
        """Write the object to ``output`` if it is there, whole, trusted and up to date."""
        try:
            text, _, content = read_trusted(kept).partition(b"\n")
            described: dict[str, Any] = json.loads(text)
            if (
                described["schema"] != SCHEMA
                or described["sha256"] != hashlib.sha256(content).hexdigest()
            ):
                return None
            for path, digest in described["digests"].items():
                state = self._memo.state(path)
                if state is None or state.digest != digest:
                    return None
            searched = [includes.Searched(*one) for one in described["searched"]]
            roots = Roots(described["labels"])
            if includes.visible_now(searched, roots).names != described["visible"]:
                return None
            source, read, path = described["unit"]
            places = (tuple(part) for part in path)
            unit = searches.Unit(source, tuple(read), searches.IncludePath(*places))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        output.write_bytes(content)
        with contextlib.suppress(OSError):
            os.utime(kept)  # it is in use
        return unit
