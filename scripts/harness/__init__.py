"""What the demo and the benchmark are made of. Not part of the installed package."""

from __future__ import annotations


class DemoError(Exception):
    """Something the person at the keyboard can put right; its text is shown without a traceback."""
