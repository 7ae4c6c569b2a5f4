"""The names of C++ functions, as they are written in the source."""

from __future__ import annotations

import ctypes


def demangle(symbol: str) -> str:
    """A C++ symbol demangled; the symbol itself if it cannot be demangled."""
    try:
        runtime, libc = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
        convert = runtime.__cxa_demangle
    except (OSError, AttributeError):
        return symbol
    convert.restype = ctypes.c_void_p
    convert.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    found = convert(symbol.encode(), None, None, None)
    if not found:
        return symbol
    try:
        return ctypes.string_at(found).decode(errors="replace")
    finally:
        libc.free.argtypes = (ctypes.c_void_p,)
        libc.free.restype = None
        libc.free(found)
