"""What there is here to build with: GPUs, compilers, torch, processors."""

from __future__ import annotations
