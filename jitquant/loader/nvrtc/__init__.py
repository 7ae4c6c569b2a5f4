"""``backend="nvrtc"``: the device half of one ``.cu``, compiled without nvcc."""

from __future__ import annotations
