"""What the command line needs from the loader, other than modules."""

from __future__ import annotations
