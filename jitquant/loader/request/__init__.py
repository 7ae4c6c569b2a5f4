"""What is asked for: sources, flags, architectures, and the level-1 key that they make."""

from __future__ import annotations
