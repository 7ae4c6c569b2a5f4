"""``backend="nvrtc"``: kernels of one ``.cu``, compiled without nvcc."""

from __future__ import annotations
