"""Builds on disk: the cache, bundles, and which build is the one that is asked for."""

from __future__ import annotations
