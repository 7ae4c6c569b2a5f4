"""What the command line asks of a loader beyond a module."""

from __future__ import annotations
