"""What the loader says: one line when a build starts, a heartbeat, one line when it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

LOG = logging.getLogger("jitquant.loader")

#: Seconds between two signs of life.
HEARTBEAT_SECONDS = 10.0


class Reporter:
    """Lines for people on stderr (``JITQUANT_QUIET=1`` silences them) and for ``logging``."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._guard = threading.Lock()

    def say(self, line: str) -> None:
        """One line, now."""
        LOG.info("%s", line)
        if os.environ.get("JITQUANT_QUIET", "") in ("", "0"):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(f"jitquant: {line}\n")
                sys.stderr.flush()

    def say_once(self, line: str) -> None:
        """One line, the first time only."""
        with self._guard:
            if line in self._said:
                return
            self._said.add(line)
        self.say(line)


class Heartbeat:
    """Says every ten seconds what a build is doing, and to ``on_tick`` each time it is told."""

    def __init__(
        self,
        reporter: Reporter,
        name: str,
        on_tick: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        self._reporter = reporter
        self._on_tick = on_tick
        self._name = name
        self._started = self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started

    def tick(self, labels: Sequence[str]) -> None:
        """Say so if it is time to."""
        self._on_tick(labels)
        now = time.monotonic()
        if now - self._last >= HEARTBEAT_SECONDS:
            self._last = now
            running = ", ".join(labels) or "waiting for a free processor"
            self._reporter.say(
                f"still building {self._name} ({now - self._started:.0f} s: {running})"
            )


def shorten(items: Sequence[str], most: int = 3) -> str:
    """``items`` joined, the rest as a number."""
    shown = ", ".join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def what_changed(
    last: dict[str, Any] | None, inputs: dict[str, Any], headers: dict[str, str | None]
) -> str:
    """Why a build is needed, from what the last build of the module was made from.

    ``headers`` maps the headers of the last build to the digests that they have now.
    """
    if last is None:
        return "first build"
    before: dict[str, Any] = last.get("inputs", {})
    reasons: list[str] = []
    old_sources = dict(map(tuple, before.get("sources", [])))
    new_sources = dict(map(tuple, inputs["sources"]))
    changed = [
        name
        for name in {**old_sources, **new_sources}
        if old_sources.get(name) != new_sources.get(name)
    ]
    old_headers: dict[str, str] = last.get("headers", {})
    changed += [name for name, digest in old_headers.items() if headers.get(name) != digest]
    if changed:
        reasons.append(f"{shorten(changed)} changed")
    for key, label in (
        ("archs", "architectures"),
        ("nvcc", "nvcc"),
        ("cudart", "CUDA runtime"),
        ("host_compiler", "host compiler"),
        ("torch", "torch"),
        ("cuda_flags", "cuda_flags"),
        ("cxx_flags", "cxx_flags"),
        ("environment", "compiler variables"),
        ("libc", "C library"),
        ("schema", "cache format"),
        ("include_dirs", "include_dirs"),
        ("machine", "machine"),
        ("cxx11_abi", "C++ ABI"),
    ):
        old, new = before.get(key), inputs.get(key)
        if old != new:
            reasons.append(f"{label}: {_plain(old)} -> {_plain(new)}")
    return "; ".join(reasons) if reasons else "not in the cache any more"


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_plain, value)) or "none"
    return str(value)
