"""Sizes, times and versions in human-readable form."""

from __future__ import annotations

import re

SIZE = r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?"
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def release(version: str) -> tuple[int, ...]:
    """Major and minor number of a version such as ``"2.13.0a0+cpu"`` or ``"13.0.88 (ptxas ...)"``.

    Empty if there are none.
    """
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def parse_size(text: str) -> int:
    """Bytes, from ``"500M"``, ``"2 GB"``, ``"1.5GiB"`` (units of 1024) or a plain number."""
    match = re.fullmatch(SIZE, text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a valid size; expected, e.g., 500M, 2GB or 1.5GiB.")
    return int(float(match[1]) * _SIZES[match[2].upper()])


def parse_duration(text: str) -> float:
    """Seconds, from ``"30d"``, ``"12h"``, ``"90m"``, ``"2w"`` or ``"45s"``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a valid duration; expected, e.g., 30d, 12h, 90m or 2w.")
    return float(match[1]) * _TIMES[match[2].lower()]


def show_size(count: int) -> str:
    """Formats a number of bytes."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def show_duration(seconds: float) -> str:
    """Formats a duration."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} days"
