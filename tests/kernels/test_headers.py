"""The generated files of ``kernels_cu/bindings`` are those that the declarations give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness.checks import Translated, Value
from harness.headers import headers, launchers, stored

from jitquant.ops import _checks


def test_headers_are_what_the_declarations_give() -> None:
    given, there = headers(), stored()
    wrong = sorted(p.name for p in given.keys() | there.keys() if given.get(p) != there.get(p))
    assert not wrong, f"{', '.join(wrong)}: run ./scripts/headers"


def test_launchers_are_the_functions_of_a_kernel_for_the_host() -> None:
    source = """
namespace jitquant {

namespace {

cudaError_t launch_hidden(int n) {
  return cudaSuccess;
}

}  // namespace

template <class T>
cudaError_t launch_as(const Matrix& x) {
  return cudaSuccess;
}

inline int least(int n) {
  return n;
}

int row_gsa_blocks(const Matrix& x) {
  return 1;
}

cudaError_t launch_row_gsa(const Matrix& x, float divisor, float* gsa,
                           cudaStream_t stream) {
  return cudaSuccess;
}

}  // namespace jitquant
"""
    assert launchers(source) == [
        "int row_gsa_blocks(const Matrix& x);\n",
        "cudaError_t launch_row_gsa(const Matrix& x, float divisor, float* gsa, "
        "cudaStream_t stream);\n",
    ]


def _check_returned(dim: int) -> Any:
    return _checks.dimension(dim)  # type: ignore[func-returns-value]


def _value_of_a_branch(dim: int, cols: int | None) -> None:
    if cols is None:
        cols = 2 * dim
    if cols < dim:
        raise ValueError(f"cols: expected {dim} or more, got {cols}")


@pytest.mark.parametrize("check", [_check_returned, _value_of_a_branch])
def test_checks_that_cannot_be_translated_are_errors(check: Callable[..., Any]) -> None:
    known = {"dim": Value("dim", "int"), "cols": Value("cols", "int | None")}
    with pytest.raises(TypeError, match="expected what can be translated, got "):
        Translated().checks(check, known)
