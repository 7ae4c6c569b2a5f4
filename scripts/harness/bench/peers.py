"""The ops as vLLM, FlashInfer, torchao and FBGEMM have them, where these are importable.

A peer takes the inputs of an op and makes the same kind of results by what
the library has for it: one call, or two where it has no single one. An amax that its caller has to
bring is none of its work, so an op that computes a scale for the tensor has no peer where the
library wants that given. Layouts of scales and the last bit differ, gate and up are halves where
they are runs here, and nothing is compared but the time.

FlashInfer's MXFP8 and FP4 are left out: below compute capability 10.0 their kernels are empty.

A library is imported when `versions` or a peer is called. What raises is for the caller to record.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.bench import peers_vllm
from harness.bench.kernels import first_line
from harness.bench.peer import Peer, module
from harness.bench.peers_fp8 import FP8_PEERS
from harness.bench.peers_nvfp4 import NVFP4_PEERS

LIBRARIES = {
    "vllm": "vllm",
    "flashinfer": "flashinfer",
    "torchao": "torchao",
    "fbgemm": "fbgemm_gpu",
}
"""Names of the columns, and what is imported for them."""

ABSENT = "not importable"

PEERS = {**NVFP4_PEERS, **FP8_PEERS}
"""By op and library."""


def versions(vllm: Path | None = None) -> dict[str, str]:
    """Each library's version; or `ABSENT`, with the reason if there is more to say.

    Args:
        vllm: the path of vLLM's `peers_vllm.LIBRARY`; None: that of the vLLM that is installed.
    """
    found = {}
    for name, package in LIBRARIES.items():
        try:
            if name == "vllm":
                found[name] = peers_vllm.load(vllm)
            else:
                found[name] = str(getattr(module(package), "__version__", "unknown"))
        except Exception as error:  # a broken install can raise anything
            missing = isinstance(error, ModuleNotFoundError) and error.name == package
            found[name] = ABSENT if missing else f"{ABSENT}: {first_line(error)}"
    return found


def absent(found: Mapping[str, str]) -> str:
    """A line that says which of `versions` there are not; "" if there are all."""
    names = [
        name + text.removeprefix(ABSENT).replace(": ", " (", 1) + (")" if text != ABSENT else "")
        for name, text in found.items()
        if text.startswith(ABSENT)
    ]
    return f"Columns are empty, as these are {ABSENT}: {', '.join(names)}." if names else ""


def peers_of(op: str, found: Mapping[str, str]) -> dict[str, Peer | None]:
    """For each library its peer of an op; None if it has none or is not importable.

    Args:
        op: name of the op.
        found: what `versions` gave.
    """
    known = PEERS.get(op, {})
    return {
        name: None if text.startswith(ABSENT) else known.get(name) for name, text in found.items()
    }
