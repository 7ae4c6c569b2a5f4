"""What is read of torch without importing it is what torch says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from jitquant.loader.errors import LoaderError
from jitquant.loader.machine.torch_install import torch_install

from .toys import ROOT

READ = """
import sys
sys.argv[0] = "jitquant"
from jitquant.loader.machine.torch_install import torch_install
print(torch_install())
assert "torch" not in sys.modules
"""


def _read(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", READ],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_is_the_same_with_and_without_importing_torch(tmp_path: Path) -> None:
    imported = torch_install()
    assert imported.identity == f"{torch.__version__} {torch.version.git_version}"
    assert imported.cuda == torch.version.cuda
    assert list(imported.include_dirs) == cpp_extension.include_paths()
    done = _read(tmp_path)
    assert done.stdout.strip() == repr(imported), done.stderr


@pytest.mark.parametrize(
    ("files", "said"),
    [({}, "incomplete"), ({"version.py": "__version__ = '3'"}, "git_version")],
)
def test_a_torch_that_is_not_whole_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], said: str
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    for name, text in {"__init__.py": "", **files}.items():
        (package / name).write_text(text)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LoaderError, match=said):
        torch_install()
