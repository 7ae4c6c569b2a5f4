"""What a live process looks at to know that a loaded module is still current."""

from __future__ import annotations
