"""jitquant.testing where there is no GPU: it is there, and says what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import jitquant


def test_it_comes_with_the_package() -> None:
    code = "import jitquant; print(jitquant.testing.count_launches, 'testing' in dir(jitquant))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "count_launches" in done.stdout
    assert done.stdout.endswith("True\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["assert_capturable", "assert_no_sync", "count_launches"])
def test_it_says_that_it_needs_a_gpu(name: str) -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        getattr(jitquant.testing, name)(lambda: None)


def test_bytes_of_any_dtype() -> None:
    x = torch.tensor([[1.0, float("nan")]])
    assert jitquant.testing.bytes_of(x).tolist() == x.view(torch.uint8).flatten().tolist()
    q = jitquant.quantize_nvfp4(torch.randn(2, 16))
    assert torch.equal(jitquant.testing.bytes_of(q.x_fp4), q.x_fp4_bytes.flatten())
