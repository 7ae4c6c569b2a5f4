"""From a plan to an entry of the cache: compile side by side, link, try to load, publish."""

from __future__ import annotations
