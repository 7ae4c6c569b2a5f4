"""The keys that builds are found by."""

from __future__ import annotations

import hashlib
import json

#: Incremented when the inputs of a key change, or the meaning of its entry.
SCHEMA = 10


def digest_of(value: object) -> str:
    """SHA-256 over the canonical JSON of ``value``."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
