"""Builds many modules ahead of time, in parallel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import LoaderError
from ..machine.processes import default_jobs
from ..request.plan import Request

if TYPE_CHECKING:
    from ..store.match import Build

#: Called with a module's name and what is running for it, many times a second.
OnTick = Callable[[str, Sequence[str]], None]


@dataclass(frozen=True)
class Outcome:
    """The result for one module; either ``build`` or ``error`` is ``None``."""

    name: str
    seconds: float
    build: Build | None
    error: Exception | None

    @property
    def state(self) -> str:
        """``"built"``, ``"hit"`` or ``"failed"``."""
        if self.build is None:
            return "failed"
        return "built" if self.build.is_new else "hit"


def build_all(
    ensure: Callable[..., Build],
    requests: Mapping[str, Request],
    *,
    on_tick: OnTick = lambda name, labels: None,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Build what the cache lacks. A module that fails does not stop the others.

    ``ensure`` is a loader's. :func:`default_jobs` compilers run at once. ``on_done`` is called in
    this thread. Interrupting this call stops the compilers too.
    """
    import torch  # noqa: F401  (threads that import it at the same time see half of it)

    interrupted = threading.Event()

    def tick(name: str, labels: Sequence[str]) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        on_tick(name, labels)

    def one(name: str, request: Request) -> Outcome:
        started = time.monotonic()
        try:
            build = ensure(request, on_tick=lambda labels: tick(name, labels))
        except (LoaderError, ValueError, TypeError, OSError) as error:
            return Outcome(name, time.monotonic() - started, None, error)
        return Outcome(name, time.monotonic() - started, build, None)

    done: dict[str, Outcome] = {}
    # Twice the compilers: a thread is also busy with hashing and linking.
    with ThreadPoolExecutor(max_workers=max(1, min(len(requests), 2 * default_jobs()))) as pool:
        futures = [pool.submit(one, name, request) for name, request in requests.items()]
        try:
            pending = set(futures)
            while pending:
                # With a timeout: an interrupt that another thread is given does not wake this one.
                finished, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    outcome = future.result()
                    done[outcome.name] = outcome
                    on_done(outcome)
        except BaseException:
            interrupted.set()
            for future in futures:
                future.cancel()
            raise
    return [done[name] for name in requests]
