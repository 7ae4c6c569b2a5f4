"""Builds on disk: the cache, bundles, and which build matches a request."""

from __future__ import annotations
