"""Importing jitquant does no work: each test looks at a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jitquant

SOURCE = Path(jitquant.__file__).parents[1]


def run(code: str, tmp_path: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JITQUANT_")}
    environment |= {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(SOURCE),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_no_side_effects(tmp_path: Path) -> None:
    run(
        """
import sys, torch
before = set(sys.modules)
import jitquant
new = set(sys.modules) - before
assert not any(m.startswith("jitquant.loader") for m in new), new
packages = {m.partition(".")[0] for m in new} - sys.stdlib_module_names
assert packages <= {"jitquant", "torch"}, packages
assert "torch.utils.cpp_extension" not in new and "subprocess" not in new, new
assert not torch.cuda.is_initialized()
x = torch.randn(4, 32)
jitquant.quantize_nvfp4(x).dequantize()
assert not torch.cuda.is_initialized()
assert "jitquant.loader" not in sys.modules
""",
        tmp_path,
    )
    assert list(tmp_path.iterdir()) == []


def test_names(tmp_path: Path) -> None:
    run(
        """
import jitquant, torch
for name in jitquant.__all__:
    assert getattr(jitquant, name) is not None, name
assert set(jitquant.__all__) <= set(dir(jitquant))
from jitquant import *
assert callable(get_cuda_module) and callable(warmup) and callable(freeze)
assert isinstance(jitquant.__version__, str)
assert torch.ops.jitquant.quantize_nvfp4
try:
    jitquant.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError
""",
        tmp_path,
    )
    assert list(tmp_path.iterdir()) == []
