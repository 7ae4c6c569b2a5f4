"""All ops that are measured, and how a list of them is chosen."""

from __future__ import annotations

from collections.abc import Iterator

from harness.bench.op import Op
from harness.bench.ops_fp8 import FP8_OPS
from harness.bench.ops_nvfp4 import NVFP4_OPS
from harness.bench.ops_ragged import RAGGED_OPS

SETS = {"all": "kernels", "fp8": "kernels-fp8", "ragged": "kernels-ragged"}  # and their files
_OPS_OF = dict(zip(SETS, (NVFP4_OPS, FP8_OPS, RAGGED_OPS), strict=True))
OPS = {op.name: op for ops in _OPS_OF.values() for op in ops}
"""By name."""


def chosen(names: str) -> Iterator[Op]:
    """The ops of a comma-separated list, or of one of `SETS`: all of NVFP4 with "all"."""
    listed = [op.name for op in _OPS_OF[names]] if names in SETS else names.split(",")
    for name in listed:
        if name not in OPS:
            raise ValueError(f"--ops: expected some of {', '.join((*SETS, *OPS))}, got {name}")
        yield OPS[name]
