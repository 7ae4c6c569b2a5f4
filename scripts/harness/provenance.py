"""What a measurement was made on and for which sources."""

from __future__ import annotations

import hashlib
import platform
import time
from typing import Any


def kernels_digest() -> str:
    """sha256 over the names and contents of kernels_cu."""
    from jitquant.loader.core import default_kernels_dir

    digest = hashlib.sha256()
    root = default_kernels_dir()
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def provenance() -> dict[str, Any]:
    """Versions, the GPU, and the digest of the CUDA sources."""
    import torch

    gpu = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
        }
    return {
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kernels_cu_sha256": kernels_digest(),
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
