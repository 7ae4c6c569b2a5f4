"""What all tests need."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from differences import Different, difference

# A shell's background jobs ignore interrupts and hand that on; tests send them to processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_equal = torch.equal


def _equal_or_difference(a: torch.Tensor, b: torch.Tensor) -> bool | Different:
    """`torch.equal`, whose False says how the tensors differ in the first line of a failure."""
    return True if _equal(a, b) else difference(a, b)


torch.equal = _equal_or_difference  # type: ignore[assignment]

INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
OWN = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Inductor's usual cache, which all checkouts share, knows ops by their names alone."""
    if INDUCTOR_CACHE not in os.environ:
        config.stash[OWN] = Path(tempfile.mkdtemp(prefix="jitquant-inductor-"))
        os.environ[INDUCTOR_CACHE] = str(config.stash[OWN])


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the cache of this run."""
    own = config.stash.get(OWN, None)
    if own is not None:
        shutil.rmtree(own, ignore_errors=True)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    """``torch.compile`` knows nothing of other tests, and they nothing of this one."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
