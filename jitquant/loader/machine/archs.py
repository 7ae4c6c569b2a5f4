"""Names of GPU architectures, and which to compile for.

A canonical name is the digits of the compute capability and a suffix: ``"90a"``, ``"80"``,
``"100f"``. From 9.0 on, the default is the arch-specific feature set (suffix ``a``), because a
module is compiled on first use for the GPU that runs it. ``f`` (family) is kept if given.
``"80+ptx"`` also embeds PTX, which later GPUs can compile.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..errors import UnsupportedArchError

#: Compute capabilities that the loader compiles for, in canonical digits.
KNOWN = (80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
#: The default if no GPU is visible.
DEFAULT = ("90a",)
#: Where :data:`DEFAULT` comes from, in messages.
NO_GPU = "default, no GPU is visible"
FORMS = "9.0, 9.0a, 90a, sm_90a, 10.0f, 100f, 8.0+PTX, 'native', or lists such as '9.0;10.0'"

_MARKETING = {
    "ampere": "8.0;8.6",
    "ada": "8.9",
    "hopper": "9.0",
    "blackwell": "10.0;10.3;12.0;12.1",
}
_FORM = r"(?a)(?:sm_|compute_)?(?:(\d{1,2})\.(\d)|(\d{2,3}))([af]?)(\+ptx)?"


class ArchChoice(NamedTuple):
    """The architectures to compile for and where they come from (for messages)."""

    archs: tuple[str, ...]
    origin: str
    skipped: tuple[str, ...] = ()


def _refuse(given: str, why: str) -> UnsupportedArchError:
    known = ", ".join(f"{n // 10}.{n % 10}" for n in KNOWN)
    return UnsupportedArchError(
        f"architecture {given!r} {why}. Accepted: {known} in the forms {FORMS}."
    )


def _in_order(archs: Iterable[str]) -> tuple[str, ...]:
    return tuple(
        sorted(set(archs), key=lambda arch: (int(arch.partition("+")[0].rstrip("af")), arch))
    )


def _canonical(item: str) -> str:
    match = re.fullmatch(_FORM, item.strip().lower())
    if match is None:
        raise _refuse(item, "has an unknown form")
    major, minor, digits, suffix, ptx = match.groups()
    number = int(digits) if digits else int(major) * 10 + int(minor)
    if number < 80:
        raise _refuse(item, "is older than 8.0")
    if number not in KNOWN:
        raise _refuse(item, "is not known")
    if number < 90 and suffix:
        raise _refuse(item, f"has no variant {suffix!r} (there is none before 9.0)")
    if number < 100 and suffix == "f":
        raise _refuse(item, "has no family variant (there is none before 10.0)")
    if number >= 90 and not suffix:
        suffix = "a"
    return f"{number}{suffix}{'+ptx' if ptx else ''}"


def parse_archs(
    value: str | Sequence[str], *, native: Callable[[], tuple[str, ...]] = lambda: ()
) -> tuple[str, ...]:
    """Canonical names, sorted and without duplicates, for ``value``.

    Raises:
        UnsupportedArchError: invalid syntax, an architecture that is unknown or below 8.0, an
            empty list, or ``"native"`` without a visible GPU.
    """
    items = [value] if isinstance(value, str) else list(value)
    found: set[str] = set()
    for item in items:
        if not isinstance(item, str):
            raise TypeError(f"archs: {item!r} is {type(item).__name__}; give strings: {FORMS}.")
        for part in re.split(r"[;,\s]+", item.strip()):
            if not part:
                continue
            name, plus, ptx = part.lower().partition("+")
            if name == "native":
                visible = native()
                if not visible:
                    raise _refuse(part, "needs a visible GPU, and there is none")
                found.update(visible)
            elif name in _MARKETING:
                found.update(_canonical(p + plus + ptx) for p in _MARKETING[name].split(";"))
            else:
                found.add(_canonical(part))
    if not items:
        raise UnsupportedArchError(
            f"archs: the list is empty; leave archs out, or give one or more of {FORMS}."
        )
    if not found:
        raise _refuse(", ".join(items), "names nothing")
    return _in_order(found)


def _parse_leniently(value: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """As :func:`parse_archs`, for a variable of other programs: (usable, skipped)."""
    usable: set[str] = set()
    skipped: list[str] = []
    for part in re.split(r"[;,\s]+", value.strip()):
        if part:
            try:
                usable.update(parse_archs(part))
            except UnsupportedArchError:
                skipped.append(part)
    return _in_order(usable), tuple(skipped)


def gencode_flags(archs: Iterable[str]) -> tuple[str, ...]:
    """The nvcc flags for canonical names; PTX is for the plain architecture."""
    flags: list[str] = []
    for arch in archs:
        name, _, ptx = arch.partition("+")
        flags.append(f"-gencode=arch=compute_{name},code=sm_{name}")
        if ptx:
            plain = name.rstrip("af")
            flags.append(f"-gencode=arch=compute_{plain},code=compute_{plain}")
    return tuple(flags)


def runs_on(built: str, wanted: str) -> bool:
    """Whether code for the canonical name ``built`` runs on ``wanted``.

    Arch-specific code runs only on its own architecture. Family code and plain code also run on
    later ones with the same major number. The driver compiles PTX for any later one.
    """
    name, _, ptx = built.partition("+")
    target = wanted.partition("+")[0]
    own, asked = int(name.rstrip("af")), int(target.rstrip("af"))
    if ptx and own <= asked:
        return True
    if name.endswith("a"):
        return own == asked and not target.endswith("f")
    return own // 10 == asked // 10 and own <= asked


def visible_archs() -> tuple[str, ...]:
    """Canonical names for the GPUs this process can use; ``()`` if there is none.

    A CUDA context is created only on a machine with different GPUs and ``CUDA_VISIBLE_DEVICES``
    set, or without NVML: there is no other way to know which of them this process sees.

    Raises:
        UnsupportedArchError: every visible GPU is older than 8.0 or unknown.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1", "NoDevFiles"):
        return ()
    from .nvml import read_driver

    driver = read_driver()
    numbers = None if driver is None else [gpu.capability for gpu in driver.gpus]
    if numbers is None:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:  # torch sees no GPU either
            return ()
    if numbers is None or (len(set(numbers)) > 1 and "CUDA_VISIBLE_DEVICES" in os.environ):
        import torch

        if not torch.cuda.is_available():
            return ()
        pairs = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
        numbers = [major * 10 + minor for major, minor in pairs]
    usable = {n for n in numbers if n in KNOWN}
    if numbers and not usable:
        raise _refuse(
            ", ".join(sorted({f"{n // 10}.{n % 10}" for n in numbers})),
            "of the visible GPU is not supported",
        )
    return _in_order(_canonical(str(n)) for n in usable)


def choose_archs(
    explicit: str | Sequence[str] | None,
    *,
    env: Callable[[str], str | None],
    native: Callable[[], tuple[str, ...]],
) -> ArchChoice:
    """What to compile for: ``archs=``, ``JITQUANT_CUDA_ARCHS``, ``TORCH_CUDA_ARCH_LIST``, the GPUs.

    ``TORCH_CUDA_ARCH_LIST`` is meant for ahead-of-time builds and often set by a container image.
    Architectures that are too old are skipped, and visible GPUs that are missing are added, because
    the module would otherwise not run here.
    """
    if explicit is not None:
        return ArchChoice(parse_archs(explicit, native=native), "archs=")
    if own := env("JITQUANT_CUDA_ARCHS"):
        try:
            return ArchChoice(parse_archs(own, native=native), "JITQUANT_CUDA_ARCHS")
        except UnsupportedArchError as error:
            raise UnsupportedArchError(f"JITQUANT_CUDA_ARCHS={own!r}: {error}") from None
    visible = native()
    if listed := env("TORCH_CUDA_ARCH_LIST"):
        usable, skipped = _parse_leniently(listed)
        have = {arch.partition("+")[0].rstrip("af") for arch in usable}
        added = tuple(arch for arch in visible if arch.rstrip("af") not in have)
        if not usable and not added:
            raise _refuse(listed, "(from TORCH_CUDA_ARCH_LIST) names nothing that is supported")
        archs = _in_order((*usable, *added))
        return ArchChoice(archs, "TORCH_CUDA_ARCH_LIST", skipped)
    if visible:
        return ArchChoice(visible, "visible GPUs")
    return ArchChoice(DEFAULT, NO_GPU)
