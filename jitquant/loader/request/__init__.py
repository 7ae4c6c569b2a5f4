"""Requests: sources, flags, architectures, and the level-1 key made from them."""

from __future__ import annotations
