"""Calls that run at the same time, and end together if one is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from .processes import default_jobs

_T = TypeVar("_T")
#: Called with what is running, many times a second.
OnTick = Callable[[Sequence[str]], None]


def call_all(
    calls: Mapping[str, Callable[[OnTick], _T]],
    on_done: Callable[[Future[_T]], object] = lambda future: None,
) -> dict[str, Future[_T]]:
    """Make ``calls`` in threads, and return their ends.

    Each is given a function to call often, which raises `KeyboardInterrupt` once this thread was
    interrupted. ``on_done`` is called in this thread.
    """
    import torch  # noqa: F401  (threads that import it at the same time see half of it)

    interrupted = threading.Event()

    def tick(labels: Sequence[str]) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt

    # Twice the compilers: a thread is also busy with hashing, linking and loading.
    with ThreadPoolExecutor(max_workers=max(1, min(len(calls), 2 * default_jobs()))) as pool:
        futures = {name: pool.submit(call, tick) for name, call in calls.items()}
        try:
            pending = set(futures.values())
            while pending:
                # With a timeout: an interrupt that another thread is given does not wake this one.
                finished, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    on_done(future)
        except BaseException:
            interrupted.set()
            for future in futures.values():
                future.cancel()
            raise
    return futures
