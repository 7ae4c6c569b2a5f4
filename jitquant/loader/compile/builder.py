"""Builds what the cache lacks: compiles in a staging directory and publishes the result."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import CacheError, CompileError, LoaderError
from ..machine.archs import NO_GPU
from ..machine.memo import Memo
from ..machine.processes import default_jobs
from ..module import is_loaded
from ..report import HEARTBEAT_SECONDS, Heartbeat, Reporter, shorten
from ..request.includes import Searched, listings, may_be_removed, removed_since, visible_now
from ..request.key import digest_of
from ..request.plan import Plan
from ..request.scan import scan_includes
from ..request.sources import is_cuda
from ..settings import setting, unknown_settings
from ..store.cache import Cache, Entry
from ..store.changes import changes_since, what_changed
from ..store.hold import Hold
from ..store.match import MOST_ATTEMPTS, Build, ChangedError, match_entry
from ..store.prune import trim
from ..units import parse_size, show_size
from .build import build
from .commands import KEPT
from .publish import describe
from .shared import SharedObjects
from .ticks import changed_after, on_the_way, wait_for_next_tick

_DEFAULT_LOCK_SECONDS = 600.0
_DEFAULT_SIZE = "4GiB"


class Builder:
    """Builds for one loader; all its builds share the processors."""

    def __init__(self, memo: Memo, *, temporary: bool) -> None:
        self._memo = memo
        self._temporary = temporary
        self._shared = SharedObjects(memo)
        self._set_jobs(default_jobs())

    def build(
        self,
        plan: Plan,
        *,
        cache: Cache,
        find: Callable[[Plan], Build | None],
        reporter: Reporter,
        on_tick: Callable[[Sequence[str]], None],
    ) -> Build:
        """Build ``plan`` in ``cache``, unless another process does so first, which ``find`` tells.

        Raises:
            ChangedError: a source changed meanwhile.
            CompileError, CacheError, LockTimeoutError, LoaderError: as
                :func:`jitquant.loader.get_cuda_module`.
        """
        if not cache.prepare():
            if not self._temporary:
                raise CacheError(
                    f"cache directory {cache.root} cannot be written to, and {plan.name} is not in "
                    "it: a build would not outlive this process. Set JITQUANT_CACHE_DIR to a "
                    "directory that can be written to."
                )
            reporter.say_once(
                f"the cache {cache.root} cannot be written to; building into a private temporary "
                "directory, which is removed when this process ends"
            )
            cache = cache.temporary()
        self._memo.attach(cache.memo_directory)
        heartbeat = Heartbeat(reporter, plan.name, on_tick)
        timeout = float(setting("JITQUANT_LOCK_TIMEOUT") or _DEFAULT_LOCK_SECONDS)

        def on_wait(owner: str, waited: float) -> None:
            on_tick([])
            reporter.say(
                f"waiting for {owner}, which is building {plan.name} "
                f"(or something with the same lock); {waited:.0f} s so far"
            )

        with cache.lock(
            plan.level1, timeout=timeout, beat=HEARTBEAT_SECONDS, on_wait=on_wait
        ) as locked:
            if found := find(plan):
                if heartbeat.seconds > 1.0:
                    reporter.say(
                        f"{plan.name}: another process built it (waited {heartbeat.seconds:.1f} s)"
                    )
                return found
            cache.sweep(plan.level1 if locked else None)
            if not locked:
                reporter.say_once(
                    f"the file system of {cache.root} has no locks; two processes may build the "
                    "same thing"
                )
            with cache.staging(plan.level1, locked) as staging:
                directory, entry, held = self._build_in(plan, cache, staging, heartbeat, reporter)
        match = match_entry(plan, self._memo, entry)
        self._memo.keep()
        if isinstance(match, str):
            held.release()
            raise ChangedError
        _trim(cache, reporter)
        return Build(entry, directory / entry.library, match, held, is_new=True)

    def _build_in(
        self, plan: Plan, cache: Cache, staging: Path, heartbeat: Heartbeat, reporter: Reporter
    ) -> tuple[Path, Entry, Hold]:
        memo = self._memo
        extension = _extension_of(plan, cache, memo)
        self._announce(plan, cache, reporter)
        changed: str | None = None
        files: tuple[str, ...] = ()
        searched: list[Searched] = []
        for attempt in range(MOST_ATTEMPTS):
            work = staging / str(attempt)
            work.mkdir(mode=0o700)
            moment, before = wait_for_next_tick(work), listings(plan.roots)
            # What the previous attempt read and looked for can be compared. In the first one, the
            # dates of directories have to do, which unrelated changes have too.
            ways = on_the_way((*plan.roots.labels.values(), *files))
            visible = visible_now(searched, plan.roots)
            jobs, slots = self._jobs, self._slots
            try:
                built = build(
                    plan,
                    extension,
                    work,
                    jobs=jobs,
                    slots=slots,
                    memo=memo,
                    shared=self._shared,
                    kept=cache.base / "toolchain",
                    on_tick=heartbeat.tick,
                    write_log=lambda text: cache.write_log(plan.name, text),
                    warn=reporter.warn,
                )
            except CompileError as error:
                if not error.out_of_memory or jobs == 1 or attempt == MOST_ATTEMPTS - 1:
                    raise
                self._set_jobs(1)
                reporter.say(
                    f"a compiler of {plan.name} was killed, most likely because memory ran out; "
                    f"from now on one compiles at a time instead of {jobs}, and {plan.name} again"
                )
                continue
            for path, digest in zip(
                plan.sources, (pair[1] for pair in plan.inputs["sources"]), strict=True
            ):
                state = memo.state(path)
                if state is None or state.digest != digest:
                    reporter.say(f"{os.path.basename(path)} changed while it was compiled")
                    raise ChangedError
            entry, files = describe(plan, extension, built, memo, heartbeat.seconds)
            changed = (
                next((name for name, digest in entry.headers.items() if not digest), None)
                or changed_after(files, moment, ways)
                or removed_since(before, entry.searched, plan.roots)
                or (
                    visible.lacking(entry.visible)
                    if searched
                    else may_be_removed(before, moment, entry.searched, plan.roots)
                )
            )
            searched = entry.searched
            if changed is None:
                break
            file = os.path.basename(changed)
            reporter.say(f"{file} changed while {plan.name} was compiled; compiling again")
        else:
            raise LoaderError(
                f"module {plan.name!r}: {changed} changed during each of {MOST_ATTEMPTS} builds. "
                "Find the program that writes to it. If a flag makes a compiler write it, leave "
                "that flag out."
            )
        final = staging / "entry"
        final.mkdir(mode=0o700)
        os.rename(built.library, final / entry.library)
        for binding in plan.bindings:
            os.rename(work / binding.file_name, final / binding.file_name)
        for kept in sorted(work.glob(f"o*{KEPT}/*")):
            name = (
                kept.name if not (final / kept.name).exists() else f"{kept.parent.stem}.{kept.name}"
            )
            os.rename(kept, final / name)
        (final / "entry.json").write_text(entry.to_json())
        published = cache.publish(final, entry)
        cache.remember_last(entry)
        reporter.say(f"built {plan.name} in {heartbeat.seconds:.1f} s")
        if plan.debug:
            reporter.say(f"{plan.name}: intermediate files are in {published[0]}")
        return published

    def _set_jobs(self, jobs: int) -> None:
        self._jobs, self._slots = jobs, threading.BoundedSemaphore(jobs)

    def _announce(self, plan: Plan, cache: Cache, reporter: Reporter) -> None:
        for name, meant in unknown_settings().items():
            reporter.say_once(f"{name} is not a setting and is ignored. {meant}")
        for note in plan.notes:
            reporter.say_once(f"{note}; using {plan.nvcc.path if plan.nvcc else 'none'}")
        if plan.archs.skipped:
            reporter.say_once(
                f"TORCH_CUDA_ARCH_LIST: {', '.join(plan.archs.skipped)} skipped (older than 8.0 "
                "or unknown)"
            )
        if plan.archs.origin == NO_GPU:
            reporter.say_once(
                "no GPU is visible: compiling for sm_90a (JITQUANT_CUDA_ARCHS chooses others)"
            )
        last = cache.last(plan.name)
        why = what_changed(changes_since(last, plan, self._memo))
        slow = [
            os.path.basename(path)
            for path in plan.sources
            if is_cuda(path) and scan_includes(path, plan.include_dirs).torch
        ]
        archs = ", ".join(f"sm_{arch}" for arch in plan.archs.archs) or "host only"
        cost = f"; the torch headers in {shorten(slow)} cost most of the time" if slow else ""
        reporter.say(f"building {plan.name} for {archs}: {why}{cost}")


def _trim(cache: Cache, reporter: Reporter) -> None:
    """Remove the least recently used entries if the cache exceeds its limit."""
    chosen = setting("JITQUANT_CACHE_MAX_SIZE") or _DEFAULT_SIZE
    if chosen == "inf":
        return
    limit = parse_size(chosen)
    with contextlib.suppress(CacheError):  # the build is there and held
        done = trim(cache, limit)
        if done is not None and done.removed:
            reporter.say(
                f"removed {shorten([build.name for build in done.removed])} from the cache, unused "
                f"for longest: it may have {show_size(limit)} (JITQUANT_CACHE_MAX_SIZE)"
            )


def _extension_of(plan: Plan, cache: Cache, memo: Memo) -> str:
    """The name of the extension that a build of ``plan`` becomes, which no other has.

    A launcher finds what it has compiled by the command line, which the name is part of. So there
    it is the same for the same files, unless a library has it that was built from others: what
    this sees is what is included in plain text, and the compiler may read more.
    """
    unique = f"{plan.name}_{os.urandom(6).hex()}"
    if not plan.launcher:
        return unique
    files = {f for source in plan.sources for f in scan_includes(source, plan.include_dirs).files}
    states = [memo.state(path) for path in sorted(files)]
    digests = sorted(state.digest for state in states if state is not None)
    name = f"{plan.name}_{digest_of([plan.level1, digests])[:12]}"
    taken = any(entry.extension == name for _, entry in cache.candidates(plan.level1))
    return unique if taken or is_loaded(f"{name}.so") else name
