"""The way of a call from a public function to the numbers and back: few files, few turns."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from samples import randn

import jitquant

PACKAGE = Path(jitquant.__file__).parent


def test_a_call_goes_through_four_files() -> None:
    x = randn(2, 32)
    jitquant.quantize_nvfp4(x)
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.append(path.relative_to(PACKAGE).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        jitquant.quantize_nvfp4(x)
    finally:
        sys.setprofile(before)
    files = {"ops/nvfp4.py", "ops/schema.py", "ops/_checks.py", "numerics/nvfp4.py"}
    assert set(entered) == files
    assert entered[0] == "ops/nvfp4.py"
    turns = sum(a != b for a, b in pairwise(entered))
    assert turns < 12, entered
    assert len(entered) <= 60, entered
