"""A CUDA toolkit without CUDA: its nvcc hands C++ to g++, in the words that the loader reads."""

from __future__ import annotations

import subprocess
from pathlib import Path

from jitquant.loader.compile.commands import _LATE

_NVCC = r"""#!/bin/sh
root=$(cd "$(dirname "$0")/.." && pwd)
output= dryrun= kept= skip= late=
for word in $NVCC_PREPEND_FLAGS "$@" $NVCC_APPEND_FLAGS; do
  case $skip in
    "") ;;
    drop) skip=; continue ;;
    host)
      kept="$kept $(echo "$word" | tr , '\n' | grep ^-fno- | xargs)"
      late=$(echo "$word" | tr , '\n' | grep 'host\.d$')
      skip=; continue ;;
    *) kept="$kept $skip $word"; skip=; continue ;;
  esac
  case $word in
    --version) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit ;;
    --list-gpu-arch) echo compute_90; exit ;;
    --dryrun) dryrun=1 ;;
    -gencode|--threads|-ccbin) skip=drop ;;
    -Xcompiler) skip=host ;;
    -I|-isystem|-o|-MF) skip=$word ;;
    -gencode=*|-lineinfo|--resource-usage|--split-compile=*) ;;
    *) kept="$kept $word" ;;
  esac
done
own="-I$root/include -isystem $root/include/cccl"
if [ -n "$dryrun" ]; then
  echo "#\$ _HERE_=$root/bin"
  echo "#\$ INCLUDES=\"-I$root/include\""
  echo "#\$ SYSTEM_INCLUDES=\"-isystem\" \"$root/include/cccl\""
  echo "#\$ LIBRARIES= \"-L$root/lib\""
  echo "#\$ g++ -E -x c++ $kept $own"
  exit
fi
g++ -x c++ -fPIC $kept $own || exit
[ -z "$late" ] || echo "x: $root/include/crt/host_runtime.h" > "$late"
"""


def write_toolkit(root: Path, cudart: int = 1) -> Path:
    """Write the toolkit to ``root``; its runtime is one C function that returns ``cudart``."""
    for place in ("bin", "include/cccl", "include/crt", "lib"):
        (root / place).mkdir(parents=True, exist_ok=True)
    for header in ("cuda_runtime.h", *_LATE):
        (root / "include" / header).write_text("")
    nvcc = root / "bin" / "nvcc"
    nvcc.write_text(_NVCC)
    nvcc.chmod(0o755)
    code = root / "cudart.cpp"
    code.write_text(f'extern "C" int cudart() {{ return {cudart}; }}\n')
    compiled = code.with_suffix(".o")
    subprocess.run(["g++", "-fPIC", "-c", code, "-o", compiled], check=True)
    library = root / "lib" / "libcudart_static.a"
    library.unlink(missing_ok=True)
    subprocess.run(["ar", "rcs", library, compiled], check=True)
    return root
