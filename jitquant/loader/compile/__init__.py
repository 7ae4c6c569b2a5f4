"""From a plan to a cache entry: compile in parallel, link, try to load, publish."""

from __future__ import annotations
