"""Diagnoses build problems: compilers, torch, GPUs, the cache, and a trial build.

Each check returns findings; a problem has a fix. Nothing is changed.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CompileError, LoaderError, extra
from ..machine.archs import KNOWN
from ..machine.nvml import Driver, read_driver
from ..machine.processes import ask, available_bytes, default_jobs
from ..machine.toolchain import Candidate, Nvcc, examine_nvccs, find_host_compiler, find_ninja
from ..machine.torch_install import OLDEST_TORCH, TorchInstall, torch_install
from ..request.plan import check_known
from ..settings import SETTINGS, unknown_settings
from ..store.bundles import open_bundle
from ..store.cache import BUNDLES, bundle_paths
from ..store.hold import has_locks
from ..store.prune import stored
from ..units import release
from ..watch.inotify import shared_file_system
from .trial_build import try_build

if TYPE_CHECKING:
    from ..core import Loader

_WHEELS = (
    "nvidia-cuda-nvcc",
    "nvidia-cuda-crt",
    "nvidia-nvvm",
    "nvidia-cuda-runtime",
    "nvidia-cuda-nvrtc",
)
OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
#: The state, the text and the fix of a finding.
_Said = tuple[str, str] | tuple[str, str, str]
_LITTLE_SPACE = 1 << 30
#: With these the loader builds in a temporary directory.
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        check: the subject: ``"torch"``, ``"nvcc"``, ``"cache"``, ...
        state: ``"ok"``, ``"note"``, ``"warning"`` or ``"error"`` (a build cannot work).
        text: what was found.
        fix: what to do about it; ``""`` if there is nothing to do.
    """

    check: str
    state: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings; ``works`` is whether the trial build worked."""

    works: bool
    seconds: float
    findings: list[Finding]


def examine(loader: Loader) -> Diagnosis:
    """Check everything that a build needs, and run a trial build meanwhile."""
    started = time.monotonic()
    findings: list[Finding] = []

    def look(check: str, about: Callable[[], Iterator[_Said]]) -> None:
        try:
            findings.extend(Finding(check, *said) for said in about())
        except LoaderError as error:
            findings.append(Finding(check, ERROR, *_split(str(error))))
        except Exception as error:  # the other findings are wanted then most of all
            text = f"could not be read ({type(error).__name__}: {error})"
            findings.append(Finding(check, WARNING, text, "See whether the trial build works."))

    cache = loader.chosen_cache()
    loader.memo.attach(None if cache.distrust() else cache.memo_directory)
    candidates = list(examine_nvccs(loader.memo))
    nvcc = next((c.nvcc for c in candidates if c.nvcc is not None), None)
    look("host compiler", partial(_about_host, loader))
    # What the compilers answered is known from here on, and not asked twice.
    trial = ThreadPoolExecutor(1).submit(try_build, loader.plan_of)
    look("torch", _about_torch)
    torch: TorchInstall | None = None
    with contextlib.suppress(LoaderError):
        torch = torch_install()
    driver = read_driver()
    look("driver", partial(_about_driver, driver))
    look("gpu", partial(_about_gpus, driver, torch))
    look("nvcc", partial(_about_nvcc, candidates, driver, torch))
    look("wheels", partial(_about_wheels, torch, wheel_versions()))
    look("architectures", partial(_about_archs, loader, nvcc))
    look("ninja", _about_ninja)
    look("settings", _about_settings)
    look("jobs", _about_memory)
    look("cache", partial(_about_cache, loader))
    look("bundles", _about_bundles)
    look("locks", partial(_about_locks, loader))
    look("trial build", partial(_about_trial, trial))
    loader.memo.keep()
    works = not any(finding.state == ERROR for finding in findings)
    return Diagnosis(works, time.monotonic() - started, findings)


def _about_host(loader: Loader) -> Iterator[_Said]:
    host = find_host_compiler(loader.memo)
    yield OK, f"{' '.join(host.command)}: {host.version}"


def _about_torch() -> Iterator[_Said]:
    torch = torch_install()
    build = f"built for CUDA {torch.cuda}" if torch.cuda else "a CPU build"
    text = f"{torch.version}, {build}, in {torch.directory}"
    if release(torch.version) < OLDEST_TORCH:
        yield (ERROR, f"{text}: older than 2.11", "Run `pip install --upgrade torch`.")
    else:
        yield OK, f"{text}; Python {platform.python_version()}"
    if importlib.util.find_spec("setuptools") is None:
        yield (
            ERROR,
            "setuptools is not installed, which torch.utils.cpp_extension imports",
            "Run `pip install setuptools`.",
        )


def _about_driver(driver: Driver | None) -> Iterator[_Said]:
    if driver is None:
        yield NOTE, "no NVIDIA driver: kernels can be compiled, not run"
    else:
        yield OK, f"{driver.version}, supports CUDA up to {driver.cuda}"


def _about_gpus(driver: Driver | None, torch: TorchInstall | None) -> Iterator[_Said]:
    if driver is None:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    for gpu in driver.gpus:
        number = gpu.capability
        text = f"{gpu.name}, sm_{number}"
        if number in KNOWN:
            yield OK, text
        else:
            yield (
                WARNING,
                f"{text}: not an architecture that is compiled for",
                "Hide it with CUDA_VISIBLE_DEVICES if there are others.",
            )
    if visible is not None:
        yield NOTE, f"CUDA_VISIBLE_DEVICES={visible!r} chooses among them"
    if torch is None or not driver.gpus:
        return
    if torch.cuda is None:
        yield (
            WARNING,
            f"torch {torch.version} is a build for CPUs and does not see these GPUs",
            "Install a CUDA build of torch (https://pytorch.org/get-started).",
        )
    elif _major(torch.cuda) > _major(driver.cuda):
        yield (
            WARNING,
            f"torch is built for CUDA {torch.cuda}, the driver supports CUDA up to {driver.cuda}",
            "Update the driver, or install a torch built for an older CUDA.",
        )


def _about_nvcc(
    candidates: list[Candidate], driver: Driver | None, torch: TorchInstall | None
) -> Iterator[_Said]:
    chosen: Nvcc | None = None
    for candidate in candidates:
        found = candidate.nvcc
        if found is None:
            state = WARNING if candidate.exists or "=" in candidate.origin else NOTE
            fix = "Reinstall or remove it." if candidate.exists else ""
            if "=" in candidate.origin:
                fix = f"Unset {candidate.origin.partition('=')[0]}, or set it to a CUDA toolkit."
            yield state, f"{candidate.origin}: {candidate.why_not}", fix
        elif chosen is None:
            chosen = found
            used = f"{found.version}, {found.path}: used, the first that works ({found.origin})"
            yield OK, used
            if "ptxas" in found.version:
                yield (
                    WARNING,
                    f"its parts are of different versions: {found.version}",
                    f"Install nvcc, nvvm and crt of one minor version, as does {extra('nvcc')}.",
                )
        elif os.path.realpath(found.path) != os.path.realpath(chosen.path):
            yield NOTE, f"{found.version}, {found.path} ({found.origin}): not used"
    if chosen is None:
        yield (
            ERROR,
            "no CUDA compiler: a .cu cannot be built",
            f"Install {extra('nvcc')}, or set CUDA_HOME to a CUDA toolkit.",
        )
    elif driver is not None and _major(chosen.version) > _major(driver.cuda):
        yield (
            WARNING,
            f"nvcc {chosen.version} generates code that this driver may not load: it supports CUDA "
            f"up to {driver.cuda}",
            "Update the driver, or set CUDA_HOME to an older toolkit.",
        )

    made_for = torch.cuda if torch is not None else None
    if chosen is not None and made_for and _major(chosen.version) != _major(made_for):
        yield (
            NOTE,
            f"nvcc is from CUDA {chosen.version}, torch from {made_for}: torch's own load() needs "
            "the same; a .cu without torch headers does not",
        )


def _about_wheels(torch: TorchInstall | None, versions: Mapping[str, str]) -> Iterator[_Said]:
    """Whether the CUDA wheels from PyPI are from one release, the one that torch is built for."""
    if not versions:
        return
    made_for = torch.cuda if torch is not None else None
    releases = {given.rpartition(".")[0] for given in versions.values()}
    if made_for and all(_major(made_for) != _major(release) for release in releases):
        made_for = None  # said of nvcc
    listed = ", ".join(f"{name} {given}" for name, given in versions.items())
    wanted = made_for or next(iter(versions.values())).rpartition(".")[0]
    fix = f"Run `pip install 'cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]=={wanted}.*'`."
    if len(releases) > 1:
        yield WARNING, f"parts of different CUDA releases: {listed}", fix
    elif made_for and releases != {made_for}:
        text = f"torch is built for CUDA {made_for}, and here are {listed}"
        yield WARNING, text, fix
    else:
        fits = f", which torch is built for, too ({made_for})" if made_for else ""
        yield OK, f"parts of one CUDA release{fits}: {listed}"


def wheel_versions() -> dict[str, str]:
    """The versions of the CUDA compiler's wheels from PyPI."""
    found: dict[str, str] = {}
    for name in _WHEELS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _about_archs(loader: Loader, nvcc: Nvcc | None) -> Iterator[_Said]:
    choice = loader.choose(None)
    names = ", ".join(f"sm_{arch}" for arch in choice.archs)
    yield OK, f"{names} ({choice.origin})"
    if choice.skipped:
        yield NOTE, f"TORCH_CUDA_ARCH_LIST also lists {', '.join(choice.skipped)}: skipped"
    if nvcc is not None:
        check_known(choice, nvcc)


def _about_ninja() -> Iterator[_Said]:
    path, origin = find_ninja()
    version = ask([path, "--version"], os.environ).strip() if path else ""
    if re.fullmatch(r"[0-9][\w.-]*", version):
        yield OK, f"{version}, {path} ({origin})"
    else:
        text = "not found" if path is None else f"{path} does not run"
        yield ERROR, f"ninja: {text}", "Run `pip install ninja`."


def _about_memory() -> Iterator[_Said]:
    jobs, memory = default_jobs(), available_bytes()
    said = f"{jobs} compilers at once"
    if memory:
        said += f"; {memory / (1 << 30):.1f} GiB of memory are free"
    if memory and memory < 1 << 30:
        yield (
            WARNING,
            f"{said}, and nvcc may need one GiB",
            "End other programs, or give the container more memory.",
        )
    else:
        yield OK, said


def _about_settings() -> Iterator[_Said]:
    for name, meant in unknown_settings().items():
        yield NOTE, f"{name}={os.environ[name]!r} is not a setting", meant
    for name, allowed in SETTINGS.items():
        value = os.environ.get(name, "")
        if value and not re.fullmatch(allowed.pattern, value):
            fix = f"Give {allowed.accepted}, or unset it."
            yield ERROR, f"{name}={value!r} is not understood", fix
        elif value:
            yield OK, f"{name}={value!r}"


def _about_cache(loader: Loader) -> Iterator[_Said]:
    cache = loader.chosen_cache()
    root = cache.root
    if why := cache.distrust():
        text, fix = _split(why)
        yield (
            WARNING,
            f"{text} Nothing is loaded from it, and every process builds for itself, in a "
            "temporary directory",
            fix,
        )
        return
    exists = cache.check()
    place = root
    while not place.exists():
        place = place.parent
    refused = None if exists else _refusal(place)
    if exists:
        builds = stored(cache)
        size = sum(build.size for build in builds) / (1 << 20)
        yield (
            OK,
            f"{root}, mode {stat.S_IMODE(place.stat().st_mode):04o}: {len(builds)} builds, "
            f"{size:.1f} MiB",
        )
    elif refused is None:
        yield OK, f"{root}: the first build creates it"
    elif refused.errno not in _READ_ONLY:
        yield ERROR, *_split(str(cache.explain_os_error(refused)))
        return
    if refused is not None or not os.access(place, os.W_OK | os.X_OK):
        yield (
            WARNING,
            f"{place} cannot be written to: every process builds for itself, in a temporary "
            "directory, and `jitquant build` refuses to",
            "Set JITQUANT_CACHE_DIR to a directory of your own.",
        )
    elif exists and not has_locks(root):
        yield (
            WARNING,
            "its file system has no locks: two processes may build the same thing, and pruning "
            "removes nothing",
            "Set JITQUANT_CACHE_DIR to a local file system.",
        )
    if network := shared_file_system(str(place)):
        yield (
            NOTE,
            f"it is on {network}, which other machines write to: hits take longer",
            "Set JITQUANT_CACHE_DIR to a local file system.",
        )
    free = shutil.disk_usage(place).free
    if free < _LITTLE_SPACE:
        yield (
            WARNING,
            f"{free / (1 << 20):.0f} MiB are free there",
            "Free some: `jitquant cache prune --max-size 500M`.",
        )


def _refusal(place: Path) -> OSError | None:
    """What the system says when a directory is made in ``place``; ``None`` if it makes one."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix="jitquant-", dir=place))
    except OSError as error:
        return OSError(error.errno, error.strerror)  # without a name that nobody has chosen
    return None


def _about_bundles() -> Iterator[_Said]:
    for path in bundle_paths():
        try:
            bundle = open_bundle(path)
        except LoaderError as error:
            yield WARNING, *_split(str(error))
        else:
            names = ", ".join(sorted({build.name for build in bundle.builds}))
            yield OK, f"{path}: {names or 'empty'}"
    if os.environ.get(BUNDLES) and not bundle_paths():
        yield NOTE, f"{BUNDLES} lists no directory"


def _about_locks(loader: Loader) -> Iterator[_Said]:
    """Who is building in the cache now. Kernel locks end with their process."""
    for owner in loader.cache().builders():
        yield NOTE, f"{owner} is building in the cache; the same build waits"


def _about_trial(trial: Future[float]) -> Iterator[_Said]:
    try:
        text = "a kernel and its binding were compiled, linked, loaded and called in "
        yield OK, f"{text}{trial.result():.1f} s"
    except CompileError as error:
        yield ERROR, str(error), "Fix what the compiler says."
    except Exception as error:
        yield ERROR, str(error), "See the findings above."


def _split(message: str) -> tuple[str, str]:
    """(problem, fix) from an error's text, whose last sentence is the fix."""
    text, line, last = message.rpartition("\n")
    if line:
        return text, last
    text, _, last = message.rpartition(". ")
    return (f"{text}.", last) if text else (message, "See docs/errors.md.")


def _major(version: str) -> tuple[int, ...]:
    return release(version)[:1]
