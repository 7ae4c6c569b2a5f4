"""What a command costs. The limit is the one promised, with room for a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from .conftest import Built


def seconds(cached: Built, *words: str) -> float:
    """The best of three runs of a whole command."""
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "jitquant", *words],
            env={**os.environ, "JITQUANT_CACHE_DIR": str(cached.cache)},
            capture_output=True,
            check=True,
        )
        best = min(best, time.perf_counter() - started)
    return best


def test_explain_takes_less_than_two_seconds(cached: Built) -> None:
    assert seconds(cached, "explain", str(cached.source)) < 2


def test_doctor_takes_about_two_seconds(cached: Built) -> None:
    assert seconds(cached, "doctor") < 5
