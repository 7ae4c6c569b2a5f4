"""Progress messages: one line when a build starts, a heartbeat, one line when it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

LOG = logging.getLogger("jitquant.loader")

#: Seconds between heartbeats.
HEARTBEAT_SECONDS = 10.0


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def outside() -> int:
    """The ``stacklevel`` with which a warning names the first caller outside of jitquant."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level


class Reporter:
    """Writes lines to stderr (``JITQUANT_QUIET=1`` silences them) and to ``logging``."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._guard = threading.Lock()

    def say(self, line: str) -> None:
        """One line, now."""
        LOG.info("%s", line)
        _write(line)

    def warn(self, text: str) -> None:
        """What a compiler warns of: to listeners, else to stderr."""
        if LOG.hasHandlers():
            LOG.warning("%s", text)
        else:  # the handler of last resort knows nothing of JITQUANT_QUIET
            _write(text)

    def say_once(self, line: str) -> None:
        """One line, the first time only."""
        with self._guard:
            if line in self._said:
                return
            self._said.add(line)
        self.say(line)


def _write(line: str) -> None:
    if os.environ.get("JITQUANT_QUIET", "") in ("", "0"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"jitquant: {line}\n")
            sys.stderr.flush()


class Heartbeat:
    """Reports every ten seconds what a build does, and calls ``on_tick`` at each tick."""

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
