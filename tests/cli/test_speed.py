"""What makes commands quick: they do not import torch. ./scripts/bench loader has the figures."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .conftest import Built


@pytest.mark.parametrize("command", ["explain", "doctor"])
def test_torch_is_not_imported(cached: Built, command: str) -> None:
    words = ["jitquant", command, *([str(cached.source)] if command == "explain" else [])]
    code = (
        f"import sys; sys.argv = {words!r}; from jitquant.cli import main; "
        "assert main() == 0 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
