"""``get_cuda_module``: from a name and sources to a loaded module."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .errors import (
    CacheError,
    CaptureError,
    FrozenError,
    HostCompilerNotFoundError,
    LoaderError,
    NoBuildError,
    NvccNotFoundError,
)
from .machine.archs import ArchChoice, choose_archs, visible_archs
from .machine.memo import Memo
from .machine.toolchain import preload_runtime
from .module import CudaModule, is_loaded, load_module
from .report import Reporter, outside
from .request.plan import Plan, Request, Wanted, checked_request, look_up, make_plan
from .request.sources import Source, Watched, kernel_names
from .settings import check_settings, setting
from .store.cache import Cache, bundle_paths, default_root
from .store.match import (
    MOST_ATTEMPTS,
    Build,
    ChangedError,
    changes_too_fast,
    match_entry,
)
from .store.texts import source_files
from .watch.inotify import Watcher
from .watch.live import reloads, warn_of_old_graphs
from .watch.record import Loaded, Record, Variables

if TYPE_CHECKING:
    from .compile.builder import Builder
    from .machine.side_by_side import OnTick
    from .nvrtc.build import DeviceLoader, DeviceModule

_NO_TICK: OnTick = lambda labels: None  # noqa: E731
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def default_kernels_dir() -> Path:
    """``kernels_cu`` inside the package (a wheel) or beside it (a checkout)."""
    package = Path(_PACKAGE)
    inside = package / "kernels_cu"
    # Path.is_dir() raises where it may not look.
    return inside if os.path.isdir(inside) else package.parent / "kernels_cu"


def capturing_now() -> bool:
    """Whether the current stream is being captured. Never initializes CUDA."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()


def _stays_equal(argument: object) -> bool:
    """Whether what equals it means the same later: another path may change what it stands for."""
    items = argument if isinstance(argument, tuple) else ()
    return all(isinstance(item, (str, PurePath, Source)) for item in items)


class Loader:
    """Compiles, caches and loads modules. Contains all state of the loader.

    Args:
        cache_dir: the cache; ``None`` means ``JITQUANT_CACHE_DIR`` or the user's cache directory.
        kernels_dir: where bare source names are looked up; ``None`` means the project's kernels.
        capturing: returns whether a CUDA graph is being captured.
        native: returns the architectures of the visible GPUs.
        temporary: whether to build in a private directory if the cache is not writable; otherwise
            that is a ``CacheError``.
        reload: whether edits are detected; ``None`` means ``JITQUANT_RELOAD``, otherwise in a
            source checkout, and for files outside the installed package.
    """

    def __init__(
        self,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        kernels_dir: str | os.PathLike[str] | None = None,
        capturing: Callable[[], bool] = capturing_now,
        native: Callable[[], tuple[str, ...]] = visible_archs,
        temporary: bool = True,
        reload: bool | None = None,
    ) -> None:
        self._cache_dir = None if cache_dir is None else Path(os.path.abspath(cache_dir))
        self._kernels_dir = None if kernels_dir is None else Path(os.path.abspath(kernels_dir))
        self._capturing = capturing
        self._native = functools.cache(native)
        self.temporary = temporary
        self._reload = reload
        self.reporter = Reporter()
        self.memo = Memo()
        self._records: dict[object, Record] = {}
        self._loaded: dict[str, list[Loaded]] = {}
        self._named: dict[str, Request] = {}
        self._superseded: dict[object, list[CudaModule]] = {}
        self._warned_of: set[str] = set()
        self._frozen = False
        self._frozen_builds = False
        self._caches: dict[Path, Cache] = {}
        self._reset_locks()

    def _reset_locks(self) -> None:
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._key_locks: dict[object, threading.Lock] = {}
        self._load_lock = threading.Lock()
        self._builder: Builder | None = None
        self._watcher: Watcher | None = None
        self._devices: DeviceLoader | None = None

    # -- the call ------------------------------------------------------------------------------

    def get(
        self,
        name: str,
        sources: Sequence[str | os.PathLike[str] | Source],
        *,
        include_dirs: Sequence[str | os.PathLike[str]] = (),
        cuda_flags: Sequence[str] = (),
        cxx_flags: Sequence[str] = (),
        archs: str | Sequence[str] | None = None,
    ) -> CudaModule:
        """See :func:`jitquant.loader.get_cuda_module`, whose ``backend`` here is ``"nvcc"``."""
        key: tuple[Any, ...] | None
        try:
            key = (
                name,
                tuple(sources),
                tuple(include_dirs),
                tuple(cuda_flags),
                tuple(cxx_flags),
                archs if archs is None or archs.__class__ is str else tuple(archs),
            )
            record = self._records.get(key)
        except TypeError:
            record, key = None, None
        if record is not None and (self._frozen or record.changed() is None):
            return record.module
        request = checked_request(name, sources, include_dirs, cuda_flags, cxx_flags, archs)
        if key is None or not all(map(_stays_equal, key)):
            return self.get_request(request)
        return self._get_slowly(key, request)

    def get_part(
        self,
        name: str,
        sources: Sequence[str | os.PathLike[str]],
        part: str,
        cuda_flags: Sequence[str],
        wider: Sequence[tuple[str, Sequence[str]]] = (),
        *,
        on_tick: OnTick = _NO_TICK,
    ) -> tuple[CudaModule, Callable[[], bool], bool]:
        """The module of ``sources`` if it is loaded or built, else a part that builds faster.

        The part is the module ``<name>_<part>``: the same sources, compiled with ``cuda_flags``,
        which leave out some kernels. ``wider`` are parts with these kernels and others, as name and
        flags: one that is loaded or built is taken instead of building. :meth:`warmup` and
        ``jitquant build`` build whole modules.

        Returns:
            The module; a function that returns whether to keep it (:meth:`up_to_date_check`; a part
            is kept until the whole module is loaded); and whether it is the part.
        """
        request = checked_request(name, sources, (), (), (), None)
        record = self._records.get(request)
        may_build = self._may_build() and not self._capturing()
        enough = [
            checked_request(f"{name}_{known}", sources, (), flags, (), None)
            for known, flags in ((part, cuda_flags), *wider)
        ]
        if self._is_ready(request):
            chosen = None
        elif may_build and not wider:
            chosen = enough[0]
        else:
            ready = filter(self._is_ready, enough)
            chosen = next(ready, enough[0] if may_build else None)
        if chosen is None:
            module = self.get_request(request, on_tick)
            return module, self.up_to_date_check(module), False
        module = self.get_request(chosen, on_tick)
        fresh = self.up_to_date_check(module)
        of = self._records.get
        return module, lambda: of(request) is record and fresh(), True

    def _is_ready(self, request: Request) -> bool:
        """Whether ``request`` is loaded, or a bundle or the cache has it."""
        record = self._records.get(request)
        if record is not None and (self._frozen or record.changed() is None):
            return True
        if self._capturing():
            return False
        wanted = self.look_up(request)
        build = self.search_bundles(wanted)[0]
        if build is None:
            # Without a compiler a bundle may still have the other of the two.
            with contextlib.suppress(NvccNotFoundError, HostCompilerNotFoundError):
                build = self.find(self.plan(wanted))
        if build is not None:
            build.hold.release()
        return build is not None

    def _may_build(self) -> bool:
        if self._frozen and not self._frozen_builds:
            return False
        return setting("JITQUANT_NO_BUILD") != "1"

    def get_request(self, request: Request, on_tick: OnTick = _NO_TICK) -> CudaModule:
        """:meth:`get` with the arguments in ``request``."""
        record = self._records.get(request)
        if record is not None and (self._frozen or record.changed() is None):
            return record.module
        return self._get_slowly(request, request, on_tick)

    def get_device_module(
        self,
        name: str,
        sources: Sequence[str | os.PathLike[str] | Source],
        *,
        include_dirs: Sequence[str | os.PathLike[str]] = (),
        cuda_flags: Sequence[str] = (),
        archs: str | Sequence[str] | None = None,
    ) -> DeviceModule:
        """See :func:`jitquant.loader.get_cuda_module`, whose ``backend`` here is ``"nvrtc"``."""
        from .nvrtc.build import DeviceLoader

        request = checked_request(name, sources, include_dirs, cuda_flags, (), archs)
        with self._guard_current():
            if self._devices is None:
                self._devices = DeviceLoader(self.look_up, self.reloads, self._check_may_compile)
        return self._devices.get(request, frozen=self._frozen)

    def _check_may_compile(self, wanted: Wanted) -> None:
        """:meth:`check_may_build` for ``backend="nvrtc"``."""
        if self._capturing():
            raise CaptureError(
                f"module {wanted.name!r} would have to be compiled, and a CUDA graph is being "
                "captured. Ask for it, and for its kernels, before the capture."
            )
        why = "backend='nvrtc' compiles in every process; backend='nvcc' does not"
        self.check_may_build(wanted, why=why)

    def _get_slowly(self, key: object, request: Request, on_tick: OnTick = _NO_TICK) -> CudaModule:
        with self._guard_current():
            self._named[request.name] = request
            lock = self._key_locks.setdefault(key, threading.Lock())
            if self._watcher is None:
                self._watcher = Watcher()
        if key not in self._records:
            self._refuse_within_capture(request.name, "is not loaded")
        with lock, self._offering_last_good(key):
            record = self._records.get(key)
            if record is not None and record.changed() is None:
                return record.module
            for _ in range(MOST_ATTEMPTS):
                # First the variables, then what depends on them: a change in between is seen.
                before = {
                    cuda: Variables.now(archs=cuda and request.archs is None, cuda=cuda)
                    for cuda in (False, True)
                }
                wanted = self.look_up(request)
                try:
                    loaded, watch = self._get_bundled(wanted) or self._get_built(wanted, on_tick)
                except ChangedError:
                    continue
                watch = watch._replace(own=wanted.watch + watch.own)
                if os.environ.get("JITQUANT_RECORD"):
                    from .request.used import note_use

                    note_use(request, wanted.archs.archs)
                self._records[key] = self._record(wanted, loaded, watch, before[wanted.has_cuda])
                older = self._superseded.setdefault(key, [])
                if record is not None and record.module not in older:
                    older.append(record.module)
                warn_of_old_graphs(loaded.module, older, self._warned_of)
                return loaded.module
            raise changes_too_fast(request.name)

    def ensure(self, request: Request, *, on_tick: OnTick = _NO_TICK) -> Build:
        """The build of ``request`` in the cache, built now if there is none. Does not load it.

        Args:
            on_tick: called many times a second while compilers run, with what is running.
        """
        for _ in range(MOST_ATTEMPTS):
            plan = self.plan_of(request)
            with contextlib.suppress(ChangedError):
                return self.find(plan) or self._build(plan, on_tick)
        raise changes_too_fast(request.name)

    @contextlib.contextmanager
    def _offering_last_good(self, key: object) -> Iterator[None]:
        try:
            yield
        except LoaderError as error:
            record = self._records.get(key)
            if record is not None:
                error.offer(record.module)
            raise

    def up_to_date_check(self, module: CudaModule) -> Callable[[], bool]:
        """A fast function that returns whether ``module`` is still current.

        It takes half a microsecond, ``get_cuda_module`` several, because it checks only the files,
        not the working directory or the variables that select architectures. It always returns
        ``True`` after :meth:`freeze`, or if edits are not detected. When it returns ``False``, call
        ``get_cuda_module`` again, and :meth:`up_to_date_check` of the result.

        Raises:
            ValueError: ``module`` is not one that ``get_cuda_module`` would return now.
        """
        records = [r for r in list(self._records.values()) if r.module is module]
        checks = [record.up_to_date_check(lambda: self._frozen) for record in records]
        if not checks:
            raise ValueError(
                f"up_to_date_check: {module!r} is not what get_cuda_module would return now; ask "
                "for it again first."
            )
        return checks[0] if len(checks) == 1 else lambda: all(check() for check in checks)

    def _refuse_within_capture(self, name: str, what: str) -> None:
        if self._capturing():
            raise CaptureError(
                f"module {name!r} {what}, and a CUDA graph is being captured: compiling and "
                "loading must not happen within a capture. Call "
                f"jitquant.warmup({name!r}) (or run the code once) before the capture."
            )

    def check_may_build(self, wanted: Wanted, *, why: str = "") -> None:
        """Raise if builds are not allowed.

        Args:
            why: why existing builds do not fit, if there are any.
        """
        if self._capturing():
            from .store.changes import changes_since, what_changed

            last = self.cache().last(wanted.name)
            why = why or what_changed(changes_since(last, wanted, self.memo))
            self._refuse_within_capture(wanted.name, f"is out of date ({why})")
        if self._may_build():
            return
        frozen = self._frozen and not self._frozen_builds
        from .request.used import command_of

        text = (
            f"module {wanted.name!r} would have to be built, which "
            f"{'jitquant.freeze()' if frozen else 'JITQUANT_NO_BUILD=1'} forbids: "
            f"{why or 'neither a bundle nor the cache has it'}."
        )
        if frozen:
            caller = sys._getframe(outside() - 1)
            text += f" Asked for at {caller.f_code.co_filename}:{caller.f_lineno}."
        text += f" To build it: {command_of(wanted.request, wanted.archs.archs)}"
        refused = self.search_bundles(wanted)[1]
        raise (FrozenError if frozen else NoBuildError)("\n  - ".join([text, *refused]))

    @contextlib.contextmanager
    def _guard_current(self) -> Any:
        """The lock of the tables; a forked child gets new locks."""
        if self._pid != os.getpid():
            self._reset_locks()
        with self._guard:
            yield

    # -- looking up ----------------------------------------------------------------------------

    def kernels_dir(self) -> Path:
        """Where bare source names are looked up."""
        return self._kernels_dir if self._kernels_dir is not None else default_kernels_dir()

    def chosen_cache(self) -> Cache:
        """The configured cache, whether or not it can be trusted."""
        root = self._cache_dir if self._cache_dir is not None else default_root()
        return self._caches.setdefault(root, Cache(root))

    def cache(self) -> Cache:
        """The cache in use: the configured one or, if others can write to it, a private one.

        Raises:
            CacheError: others can write to it, and builds have to be kept.
        """
        cache = self.chosen_cache()
        if not (why := cache.distrust()):
            return cache
        if not self.temporary:
            raise CacheError(why)
        self.reporter.say_once(
            f"nothing is loaded from the cache; building into a private temporary directory, which "
            f"is removed when this process ends: {why}"
        )
        return cache.temporary()

    def choose(self, explicit: str | Sequence[str] | None) -> ArchChoice:
        """The architectures for ``archs=explicit``."""
        return choose_archs(explicit, env=os.environ.get, native=self._native)

    def look_up(self, request: Request) -> Wanted:
        """The files and architectures of a request."""
        check_settings()
        sources = source_files(request.name, request.sources, self.cache)
        request = request._replace(sources=sources)
        return look_up(request, kernels_dir=self.kernels_dir(), memo=self.memo, choose=self.choose)

    def plan(self, wanted: Wanted) -> Plan:
        """The request with the compilers for it."""
        cache = self.cache()
        cache.check()
        self.memo.attach(cache.memo_directory)
        try:
            return make_plan(wanted, self.memo)
        except (NvccNotFoundError, HostCompilerNotFoundError) as error:
            refused = self.search_bundles(wanted)[1]
            if paths := bundle_paths():
                refused = refused or [f"{path}: it has no such module" for path in paths]
                listed = "\n".join(f"  - {line}" for line in refused)
                error.args = (f"{error.args[0]}\nNo bundle has it ready:\n{listed}",)
            raise

    def plan_of(self, request: Request) -> Plan:
        """The files, architectures and compilers of a request."""
        return self.plan(self.look_up(request))

    def search_bundles(self, wanted: Wanted) -> tuple[Build | None, list[str]]:
        """The requested build in ``JITQUANT_BUNDLES``, and why other builds do not fit."""
        paths = bundle_paths()
        if not paths:
            return None, []
        from .store.bundles import search

        return search(paths, wanted, self.memo)

    def _record(
        self, wanted: Wanted, loaded: Loaded, watch: Watched, variables: Variables
    ) -> Record:
        request = wanted.request
        relative = any(
            not os.path.isabs(s) and (not isinstance(s, str) or os.path.dirname(s))  # type: ignore[arg-type]
            for s in request.sources
        ) or any(not os.path.isabs(d) for d in request.include_dirs)
        return Record(
            loaded.module,
            loaded.entry,
            watch,
            variables=variables,
            directory=os.getcwd() if relative else None,
            watcher=self._watcher,
            reloads=self.reloads(wanted),
        )

    def reloads(self, wanted: Wanted) -> bool:
        """Whether edits of the requested files are detected."""
        if self._reload is not None:
            return self._reload
        return reloads((*wanted.sources, *wanted.include_dirs))

    def _get_bundled(self, wanted: Wanted) -> tuple[Loaded, Watched] | None:
        """The module loaded from a bundle, if one has it. Reports once why others do not fit."""
        build, refused = self.search_bundles(wanted)
        if build is not None:
            try:
                return self._load(wanted, build)
            except LoaderError as error:
                refused.append(str(error))
        for line in refused:
            self.reporter.say_once(f"not taken from a bundle: {line}")
        return None

    def _get_built(self, wanted: Wanted, on_tick: OnTick) -> tuple[Loaded, Watched]:
        """The module, if this process has it; otherwise loaded from the cache or built."""
        try:
            plan = self.plan(wanted)
        except (NvccNotFoundError, HostCompilerNotFoundError) as error:
            # A key of the cache has the compilers in it.
            self.check_may_build(wanted, why=str(error).splitlines()[0].rstrip(" :."))
            raise
        return self._find_loaded(plan) or self._load(
            plan, self.find(plan) or self._build(plan, on_tick)
        )

    def _build(self, plan: Plan, on_tick: OnTick) -> Build:
        self.check_may_build(plan)
        from .compile.builder import Builder

        with self._guard_current():
            if self._builder is None:
                self._builder = Builder(self.memo, temporary=self.temporary)
        return self._builder.build(
            plan, cache=self.cache(), find=self.find, reporter=self.reporter, on_tick=on_tick
        )

    def _find_loaded(self, plan: Plan) -> tuple[Loaded, Watched] | None:
        for loaded in self._loaded.get(plan.level1, ()):
            match = match_entry(plan, self.memo, loaded.entry)
            if not isinstance(match, str):
                return loaded, match
        return None

    def find(self, plan: Plan) -> Build | None:
        """The build of ``plan`` in the cache, held there."""
        caches = [self.cache()]
        if caches[0].has_temporary:
            caches.append(caches[0].temporary())
        for cache in caches:
            for directory, entry in cache.candidates(plan.level1):
                match = match_entry(plan, self.memo, entry)
                if not isinstance(match, str) and (held := cache.open_library(directory, entry)):
                    self.memo.keep()
                    return Build(entry, directory / entry.library, match, held)
        return None

    def _load(self, wanted: Wanted, build: Build) -> tuple[Loaded, Watched]:
        entry = build.entry
        with self._load_lock:
            for loaded in self._loaded.get(entry.level1, ()):
                if loaded.entry.level2 == entry.level2:
                    build.hold.release()
                    return loaded, build.watch
            self._refuse_within_capture(wanted.name, "is out of date")
            self._check_namespaces(wanted, build)
            preload_runtime(
                entry.inputs["cudart"], wanted.nvcc if isinstance(wanted, Plan) else None
            )
            module = load_module(
                wanted.name,
                extension_name=entry.extension,
                key=entry.level2,
                archs=entry.inputs["archs"],
                path=build.library,
                opened=build.hold.path,
                ops=entry.ops,
                init_symbols=entry.init_symbols,
            )
            build.hold.keep()
            loaded = Loaded(entry, module)
            self._loaded.setdefault(entry.level1, []).append(loaded)
            return loaded, build.watch

    def _check_namespaces(self, wanted: Wanted, build: Build) -> None:
        """Try to load a library in a child if it may register names that this process has.

        Registering an operator twice terminates the process.
        """
        if is_loaded(build.library.name):
            return
        own = f"{build.entry.extension}::"
        fixed = {op.partition("::")[0] for op in build.entry.ops if not op.startswith(own)}
        if not fixed:
            return
        from .compile.advice import registered_namespaces
        from .compile.trial import try_load

        if not fixed & registered_namespaces():
            return
        scratch = self.cache()
        if not scratch.prepare():
            scratch = scratch.temporary()
        try_load(build.library, build.hold, scratch.base / "staging", wanted.sources)

    # -- before and after ----------------------------------------------------------------------

    def warmup(
        self,
        *names: str,
        devices: Iterable[int] | None = None,
        manifest: str | os.PathLike[str] | None = None,
        parts: Mapping[str, Sequence[tuple[str, tuple[str, ...]]]] = MappingProxyType({}),
    ) -> dict[str, CudaModule]:
        """Build in parallel, load and make resident the named modules, or all without names.

        Afterwards the first launch of a kernel can be captured in a CUDA graph.

        Args:
            names: kernels of the project (``"amax_gsa"``), or modules requested earlier.
            devices: indices of the GPUs to load the kernels on; ``None`` means the current one.
            manifest: a file from ``jitquant record``, whose modules are added to ``names``.
            parts: for kernels of the project, the parts that are enough: each the ``part`` and
                ``cuda_flags`` of :meth:`get_part`. A whole module that is built replaces them.

        Returns:
            The modules by name; the second variant of a name in a manifest is ``"name (2)"``.

        Raises:
            ValueError: a name is unknown, or the file is not a manifest.
            FileNotFoundError: the manifest, or a source in it, does not exist.
            CaptureError: a CUDA graph is being captured.
            LoaderError: as ``get_cuda_module``, for the first module that failed.
        """
        from .warm import request_to_warm, warm

        # Asked here, since the threads that build have streams of their own.
        if self._capturing():
            raise CaptureError(
                f"warmup({', '.join(map(repr, names))}): a CUDA graph is being captured, and "
                "compiling and loading must not happen within a capture. Call it before."
            )
        ours = kernel_names(self.kernels_dir())
        requests = {}
        if manifest is not None:
            from .request.used import read_manifest

            requests = read_manifest(Path(manifest), as_built=False)
        elif not names:
            names = tuple(ours)
        wanted = {
            name: functools.partial(self.get_request, request) for name, request in requests.items()
        }
        for name in names:
            request = request_to_warm(name, self._named, ours)
            if name not in parts or request != Request(name, (f"{name}.cu",)):
                wanted[name] = functools.partial(self.get_request, request)
                continue
            for part, flags in parts[name]:
                wanted[f"{name}_{part}"] = functools.partial(
                    self._get_part_alone, name, part, flags
                )
        return warm(wanted, devices)

    def _get_part_alone(
        self, name: str, part: str, flags: tuple[str, ...], on_tick: OnTick
    ) -> CudaModule:
        return self.get_part(name, [f"{name}.cu"], part, flags, on_tick=on_tick)[0]

    def freeze(self, *, build: bool = False) -> None:
        """See :func:`jitquant.loader.freeze`."""
        self._frozen, self._frozen_builds = True, build

    def unfreeze(self) -> None:
        """See :func:`jitquant.loader.unfreeze`."""
        self._frozen = False
