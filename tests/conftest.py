"""What all tests need."""

from __future__ import annotations

import signal

# A shell's background jobs ignore interrupts and hand that on; tests send them to processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
