"""Linking where the compiler or the place of torch is unusual."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from .toys import new_loader, write_plain

SOURCE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <sstream>
torch::stable::Tensor refuse(const torch::stable::Tensor& x) {
  std::ostringstream text;
  text << "refused: " << x.dim() << ' ' << 0.5;
  throw std::runtime_error(text.str());
}
STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("refuse(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, m) { m.impl("refuse", TORCH_BOX(&refuse)); }
"""


@pytest.mark.slow
def test_a_compiler_that_links_its_runtime_statically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcc = shutil.which("g++")
    if gcc is None:
        pytest.skip("no g++")
    monkeypatch.setenv("CXX", f"{gcc} -static-libstdc++")
    source = tmp_path / "refuse.cpp"
    source.write_text(SOURCE)
    module = new_loader(tmp_path / "cache").get("refuse", [source])
    needed = subprocess.run(["readelf", "-d", str(module.path)], capture_output=True, text=True)
    assert "libstdc++.so.6" in needed.stdout
    assert ctypes.CDLL(str(module.path))
    with pytest.raises(RuntimeError, match=r"refused: 2 0\.5"):
        module.refuse(torch.ones(2, 2))


@pytest.mark.slow
def test_torch_in_a_path_with_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    spaced = tmp_path / "with a space"
    spaced.symlink_to(cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(spaced))
    source = tmp_path / "refuse.cpp"
    source.write_text(SOURCE)
    module = new_loader(tmp_path / "cache").get("refuse", [source])
    with pytest.raises(RuntimeError, match="refused"):
        module.refuse(torch.ones(2, 2))
    assert str(spaced) == cpp_extension.TORCH_LIB_PATH


def test_a_cache_of_compilers_that_is_just_on_path_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would run the compiler through it, which hides for example how the compiler ended."""
    ccache = tmp_path / "bin" / "ccache"
    ccache.parent.mkdir()
    ccache.write_text("#!/bin/sh\nexit 1\n")
    ccache.chmod(0o755)
    monkeypatch.setenv("PATH", str(ccache.parent), prepend=os.pathsep)
    module = new_loader(tmp_path / "cache").get("plain", [write_plain(tmp_path / "source")])
    assert module.library.factor() == 3
