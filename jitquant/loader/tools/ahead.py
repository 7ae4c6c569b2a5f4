"""Builds many modules ahead of time, in parallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..errors import LoaderError
from ..machine.side_by_side import OnTick, call_all
from ..request.plan import Request

if TYPE_CHECKING:
    from ..store.match import Build


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
    on_tick: Callable[[str, Sequence[str]], None] = lambda name, labels: None,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Build what the cache lacks. A module that fails does not stop the others.

    ``ensure`` is a loader's. ``on_tick`` is called many times a second with a module's name and
    what is running for it, ``on_done`` in this thread. Interrupting this call stops the compilers.
    """

    def one(name: str, request: Request, tick: OnTick) -> Outcome:
        def tick_both(labels: Sequence[str]) -> None:
            tick(labels)
            on_tick(name, labels)

        started = time.monotonic()
        try:
            build = ensure(request, on_tick=tick_both)
        except (LoaderError, ValueError, TypeError, OSError) as error:
            return Outcome(name, time.monotonic() - started, None, error)
        return Outcome(name, time.monotonic() - started, build, None)

    calls = {name: partial(one, name, request) for name, request in requests.items()}
    done = call_all(calls, lambda future: on_done(future.result()))
    return [future.result() for future in done.values()]
