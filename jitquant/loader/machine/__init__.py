"""What this machine has for builds: GPUs, compilers, torch, processors."""

from __future__ import annotations
