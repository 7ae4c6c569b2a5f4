"""``backend="nvrtc"``: from a request to a cubin, through the same cache as any other build.

NVRTC reads a copy of the sources from which the host's functions are gone (:mod:`.device_half`).
It writes no depfile, so what a build depends on are all headers that its text could include.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..diagnostics import compile_error
from ..errors import CaptureError, FrozenError, LoaderError
from ..request.key import digest_of
from ..request.plan import Request, Wanted
from ..request.sources import CUDA_SUFFIXES, INCLUDE, FileHasher, visible_names
from ..store.cache import Cache, Entry
from ..store.match import match_entry, take
from .device_half import DeviceHalf, device_half
from .device_module import Cubin, DeviceModule, Launch, Parameter, make_launch, parameters_of
from .nvrtc import Nvrtc, NvrtcFailure, cuda_header_version

_COMPUTED = re.compile(rb"^[ \t]*#[ \t]*include[ \t]+[A-Za-z_]", re.MULTILINE)
_MOST_ATTEMPTS = 5
_HINT = (
    "NVRTC compiles the device half alone: what a kernel needs must be __device__ or constexpr, "
    "and host code that stands within a class or a macro belongs in #ifndef __CUDACC_RTC__."
)


@dataclass(frozen=True)
class _Closure:
    """All own headers that a source's text could include, and the names that it includes."""

    headers: tuple[str, ...]
    included: tuple[str, ...]
    computed: bool


class _Latest(NamedTuple):
    """What a request was given last, and whether edits of its files are looked for."""

    module: DeviceModule
    reloads: bool


class DeviceBuilder:
    """Compiles, caches and remembers the device halves of modules for one loader."""

    def __init__(
        self,
        *,
        look_up: Callable[[Request], Wanted],
        hasher: FileHasher,
        cache: Callable[[], Cache],
        reloads: Callable[[Wanted], bool],
        check_may_build: Callable[[Wanted], None],
    ) -> None:
        self._look_up = look_up
        self._hasher = hasher
        self._cache = cache
        self._reloads = reloads
        self._check_may_build = check_may_build
        self._guard = threading.Lock()
        self._nvrtc: Nvrtc | None = None
        self._modules: dict[str, DeviceModule] = {}
        self._latest: dict[Request, _Latest] = {}
        self._launch: Launch = make_launch()

    def get(self, request: Request, *, frozen: bool, capturing: bool) -> DeviceModule:
        """The module of ``request`` as its files are now.

        Raises:
            ValueError: not one ``.cu``, or several architectures.
            NvrtcNotFoundError, CompileError, FrozenError, CaptureError: as their names say.
        """
        with self._guard:
            latest = self._latest.get(request)
            if latest is not None and (frozen or not latest.reloads):
                return latest.module
            if frozen or capturing:
                raise (FrozenError if frozen else CaptureError)(
                    f"module {request.name!r} is not loaded for backend='nvrtc', and "
                    f"{'jitquant.freeze() was called' if frozen else 'a graph is being captured'}."
                )
            for _ in range(_MOST_ATTEMPTS):
                wanted, half = self._read(request, None)
                module = self._modules.get(wanted.key)
                if module is None:
                    module = DeviceModule(
                        request.name,
                        wanted.arch,
                        self._cubin(wanted, half, wanted.names),
                        half.kernels,
                        lambda expression: self._one(request, expression),
                        self._launch,
                    )
                if self._read(request, None)[0].key == wanted.key:
                    self._modules[wanted.key] = module
                    self._latest[request] = _Latest(module, self._reloads(wanted.of))
                    return module
        raise LoaderError(f"module {request.name!r}: its sources change faster than they compile.")

    def _one(self, request: Request, expression: str) -> Cubin:
        with self._guard:
            wanted, half = self._read(request, [expression])
            return self._cubin(wanted, half, [expression])

    def _read(
        self, request: Request, expressions: Sequence[str] | None
    ) -> tuple[_Wanted, DeviceHalf]:
        """What is wanted, and the device half; ``None`` names all kernels that are no templates."""
        path = self._source(self._look_up(request))
        half = _half_of(path)
        if expressions is None:
            expressions = [kernel.name for kernel in half.kernels if not kernel.template]
        return self._wanted(request, expressions), half

    @staticmethod
    def _source(wanted: Wanted) -> str:
        kernels = [path for path in wanted.sources if path.lower().endswith(CUDA_SUFFIXES)]
        if len(kernels) != 1:
            raise ValueError(
                f"sources: backend='nvrtc' compiles one .cu, and {len(kernels)} were named."
            )
        return kernels[0]

    def _wanted(self, request: Request, expressions: Sequence[str]) -> _Wanted:
        wanted = self._look_up(request)
        kernel = self._source(wanted)
        if len(wanted.archs.archs) != 1:
            raise ValueError(
                f"archs: backend='nvrtc' compiles for one architecture, and "
                f"{', '.join(wanted.archs.archs)} (from {wanted.archs.origin}) are "
                f"{len(wanted.archs.archs)}; give one, such as archs='90a'."
            )
        if self._nvrtc is None:
            self._nvrtc = Nvrtc()
        (arch,) = wanted.archs.archs
        closure = _closure(kernel, wanted.include_dirs)
        digests = {
            "/".join(wanted.roots.name(path)): state.digest
            for path in closure.headers
            if (state := self._hasher.state(path)) is not None
        }
        inputs = {
            key: value
            for key, value in wanted.inputs.items()
            if key not in ("cxx_flags", "cxx11_abi", "libc", "torch", "binding_generator")
        }
        inputs |= {
            "backend": "nvrtc",
            "nvrtc": self._nvrtc.version,
            "cuda_headers": cuda_header_version(self._nvrtc.include_dirs),
            "library": _digest_of_own_headers(),
            "kernels": list(expressions),
        }
        source = os.path.basename(kernel)
        inputs["sources"] = [pair for pair in wanted.inputs["sources"] if pair[0] == source]
        return _Wanted(
            wanted,
            kernel,
            arch.partition("+")[0],
            closure,
            digests,
            inputs,
            tuple(expressions),
        )

    def _cubin(self, wanted: _Wanted, half: DeviceHalf, expressions: Sequence[str]) -> Cubin:
        cache = self._cache()
        cache.check()
        if not wanted.closure.computed and (found := self._find(cache, wanted)):
            return found
        if not cache.prepare():
            cache = cache.temporary()
            if not wanted.closure.computed and (found := self._find(cache, wanted)):
                return found
        self._check_may_build(wanted.of)
        with cache.staging(wanted.level1, False) as staging:
            return self._compile(cache, staging, wanted, half, expressions)

    def _find(self, cache: Cache, wanted: _Wanted) -> Cubin | None:
        for directory, entry in cache.candidates(wanted.level1):
            match = match_entry(wanted.of, self._hasher, entry)
            if not isinstance(match, str) and (found := take(cache, directory, entry, match)):
                found.hold.keep()
                return _cubin_of(directory, entry)
        return None

    def _compile(
        self,
        cache: Cache,
        staging: Path,
        wanted: _Wanted,
        half: DeviceHalf,
        expressions: Sequence[str],
    ) -> Cubin:
        assert self._nvrtc is not None
        started = time.monotonic()
        name, path = wanted.of.name, wanted.source
        copies = staging / "device"
        directories = _copy_device_halves(wanted, copies)
        given = wanted.of.request.cuda_flags
        options = [
            f"--gpu-architecture=sm_{wanted.arch}",
            "-default-device",
            "-lineinfo",
            *([] if any("-std" in flag for flag in given) else ["-std=c++17"]),
            *(f"-I{directory}" for directory in (*directories, *self._nvrtc.include_dirs)),
            *given,
        ]
        try:
            # Under a name beside the copies, since that is where "..." is looked for first.
            compiled = self._nvrtc.compile(
                _called(path, half.text),
                str(_copy_of(wanted, copies, path)),
                options,
                expressions,
            )
        except NvrtcFailure as failure:
            log = cache.write_log(name, failure.log)
            hint = f"\n{_HINT}" if "JIT mode" in failure.log or "identifier" in failure.log else ""
            error = compile_error(
                name,
                label="NVRTC",
                command=["nvrtc", *options, path],
                returncode=failure.code,
                text=failure.log,
                root=Path(path).parent,
                log_path=log,
            )
            error.args = (error.args[0] + hint,)
            raise error from None
        parameters = parameters_of(compiled.ptx)
        headers = dict(sorted(wanted.digests.items()))
        entry = Entry(
            name=name,
            extension=f"{name}_{os.urandom(6).hex()}",
            level1=wanted.level1,
            inputs=wanted.inputs,
            headers=headers,
            visible=visible_names(wanted.of.roots, wanted.closure.included, headers),
            included=sorted(wanted.closure.included),
            python_abi=None,
            library_sha256=hashlib.sha256(compiled.cubin).hexdigest(),
            library_size=len(compiled.cubin),
            ops=[],
            init_symbols=[],
            info={
                "seconds": round(time.monotonic() - started, 3),
                "built": time.time(),
                "pid": os.getpid(),
                "sources": [path],
                "symbols": {
                    expression: [symbol, parameters.get(symbol, [])]
                    for expression, symbol in compiled.symbols.items()
                },
            },
        )
        final = staging / "entry"
        final.mkdir(mode=0o700)
        (final / entry.library).write_bytes(compiled.cubin)
        (final / "entry.json").write_text(entry.to_json())
        directory, kept, held = cache.publish(final, entry)
        held.keep()
        return _cubin_of(directory, kept)


@dataclass(frozen=True)
class _Wanted:
    of: Wanted
    source: str
    arch: str
    closure: _Closure
    digests: dict[str, str]
    inputs: dict[str, object]
    names: tuple[str, ...]

    @property
    def level1(self) -> str:
        return digest_of(self.inputs)

    @property
    def key(self) -> str:
        return digest_of([self.level1, self.digests])


def _cubin_of(directory: Path, entry: Entry) -> Cubin:
    kernels = {
        expression: (symbol, tuple(Parameter(kind, size) for kind, size in parameters))
        for expression, (symbol, parameters) in entry.info["symbols"].items()
    }
    return Cubin(directory / entry.library, entry.level2, kernels)


def _half_of(path: str) -> DeviceHalf:
    with open(path, encoding="utf-8", errors="replace") as stream:
        return device_half(stream.read())


def _closure(source: str, directories: Sequence[str]) -> _Closure:
    queue, computed = [source], False
    headers: dict[str, None] = {}
    included: dict[str, None] = {}
    while queue:
        current = queue.pop()
        with open(current, "rb") as stream:
            text = stream.read()
        computed = computed or bool(_COMPUTED.search(text))
        for quote, raw in re.findall(INCLUDE, text):
            name = raw.decode(errors="replace")
            included[name] = None
            beside = [os.path.dirname(current)] if quote == b'"' else []
            for directory in [*beside, os.path.dirname(source), *directories]:
                candidate = os.path.normpath(os.path.join(directory, name))
                if os.path.isfile(candidate):
                    if candidate not in headers and candidate != source:
                        headers[candidate] = None
                        queue.append(candidate)
                    break
    return _Closure(tuple(headers), tuple(included), computed)


def _copy_device_halves(wanted: _Wanted, target: Path) -> list[str]:
    """Write the device half of each header below ``target``, as they stand to each other.

    Returns the directories to search, in the order of the originals. Messages and line tables name
    the originals.
    """
    for path in wanted.closure.headers:
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:
            text = stream.read()
        copy = _copy_of(wanted, target, path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(_called(path, device_half(text).text), errors="surrogateescape")
    return [str(target / label) for label in wanted.of.roots.labels]


def _copy_of(wanted: _Wanted, target: Path, path: str) -> Path:
    return Path(os.path.normpath(target.joinpath(*wanted.of.roots.name(path))))


def _called(path: str, text: str) -> str:
    shown = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'#line 1 "{shown}"\n{text}'


def _digest_of_own_headers() -> str:
    """What stands in for the C++ library, and what takes the host's half away, in one digest."""
    from . import device_half as half
    from .nvrtc import INCLUDE_DIR

    digest = hashlib.sha256(Path(half.__file__).read_bytes())
    for name in sorted(os.listdir(INCLUDE_DIR)):
        digest.update(name.encode() + b"\0" + Path(INCLUDE_DIR, name).read_bytes())
    return digest.hexdigest()
