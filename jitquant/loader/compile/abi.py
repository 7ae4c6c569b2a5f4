"""Whether a library needs one build of torch, or runs with every newer one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

#: Names of C++ in a namespace of torch, and of C in torch's Python bindings. The functions of the
#: stable ABI are aoti_torch_* and torch_*, in C.
_UNSTABLE = re.compile(r" (?:THP\w+|_Z\w*?N[VKRO]*(?:3c10|2at|5torch|6caffe2)\w*)(?:@|$)", re.M)


def links_stable(library: Path) -> bool:
    """Whether ``library`` uses torch only through its stable ABI.

    ``False`` if that is unknown, because binutils' nm is missing.
    """
    program = shutil.which("nm") or shutil.which("llvm-nm")
    if program is None:
        return False
    try:
        listed = subprocess.run(
            [program, "-D", "--undefined-only", str(library)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return _UNSTABLE.search(listed) is None
