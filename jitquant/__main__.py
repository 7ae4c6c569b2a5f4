"""``python -m jitquant``."""

from __future__ import annotations

import sys

from jitquant.cli import main

sys.exit(main())
