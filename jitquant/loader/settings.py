"""The environment variables of jitquant, and what each may be."""

from __future__ import annotations

import difflib
import os
import re
from typing import NamedTuple

from .units import SIZE


class Setting(NamedTuple):
    """The accepted values of a variable: a pattern, and its description."""

    pattern: str
    accepted: str


_PREFIX = "JITQUANT_"
_OF_OTHERS = ("JITQUANT_COMPUTE", "JITQUANT_PYTHON", "JITQUANT_RESULTS")
_SWITCH = r"[01]"
#: Architectures and directories are checked where they are used.
SETTINGS = {
    "JITQUANT_BUNDLES": Setting(r"(?s).*", "directories, separated by ':'"),
    "JITQUANT_CACHE_DIR": Setting(r"(?s).*", "a directory"),
    "JITQUANT_CACHE_GROUP": Setting(r"(?s).*", "the name of a group"),
    "JITQUANT_CACHE_MAX_SIZE": Setting(rf"(?i){SIZE}|inf", "a size such as 500M or 4GB, or inf"),
    "JITQUANT_CUDA_ARCHS": Setting(r"(?s).*", "architectures"),
    "JITQUANT_DEBUG": Setting(_SWITCH, "1 (build for a debugger) or 0"),
    "JITQUANT_JOBS": Setting(r"0*[1-9][0-9]*", "a number of compilers, 1 or more"),
    "JITQUANT_LOCK_TIMEOUT": Setting(
        r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf", "a number of seconds, 0 or more"
    ),
    "JITQUANT_NO_BUILD": Setting(_SWITCH, "1 (load what was built, compile nothing) or 0"),
    "JITQUANT_NVCC_LAUNCHER": Setting(r"(?s).*", "a program such as sccache, on PATH"),
    "JITQUANT_QUIET": Setting(_SWITCH, "1 (nothing on stderr) or 0"),
    "JITQUANT_RECORD": Setting(r"(?s).*", "a file"),
    "JITQUANT_RELOAD": Setting(_SWITCH, "1 (look for edits) or 0"),
}


def setting(name: str) -> str:
    """The value of a variable, ``""`` if it is not set.

    Raises:
        ValueError: it is not what the variable may be.
    """
    value = os.environ.get(name, "")
    if value and not re.fullmatch(SETTINGS[name].pattern, value):
        raise ValueError(f"{name}={value!r}: give {SETTINGS[name].accepted}.")
    return value


def unknown_settings() -> dict[str, str]:
    """Variables that look like settings but are unknown, each with a suggestion."""
    unknown = sorted(name for name in os.environ if name.startswith(_PREFIX))
    found: dict[str, str] = {}
    for name in unknown:
        if name in SETTINGS or name in _OF_OTHERS:
            continue
        words = [known.removeprefix(_PREFIX) for known in SETTINGS]
        near = difflib.get_close_matches(name.removeprefix(_PREFIX), words, n=1)
        found[name] = (
            f"{_PREFIX}{near[0]} is meant?" if near else f"There are {', '.join(SETTINGS)}."
        )
    return found


def check_settings() -> None:
    """Reject values that a build would detect only after seconds, or not at all."""
    for name in SETTINGS:
        setting(name)
