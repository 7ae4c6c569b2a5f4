"""The keys that builds are found by."""

from __future__ import annotations

import hashlib
import json

#: Grows when what a key is made from changes, or what an entry below it says.
SCHEMA = 3


def digest_of(value: object) -> str:
    """SHA-256 over the canonical JSON of ``value``."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
