"""What each kernel needs of an SM: registers, shared memory, spills, occupancy.

The assembler reports the first three while it compiles; they are stored with the build.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..machine.symbols import demangle

_ENTRY = re.compile(r"^ptxas info\s*: Compiling entry function '(\S+)' for 'sm_(\w+)'$")
_OF = re.compile(r"^ptxas info\s*: Function properties for (\S+)$")
_STACK = re.compile(
    r"^\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads$"
)
_USED = re.compile(r"^ptxas info\s*: Used (\d+) registers(.*)$")
_SHARED = re.compile(r"(\d+) bytes smem")
_OTHER = re.compile(r"^ptxas info\s*: ")

#: Per multiprocessor: resident warps, resident blocks, KiB of shared memory. From the table of
#: technical specifications in the CUDA Programming Guide and from cuda_occupancy.h; all of them
#: have 64 K registers in four partitions, and reserve 1 KiB of shared memory in each block.
_LIMITS = {
    80: (64, 32, 164),
    86: (48, 16, 100),
    87: (48, 16, 164),
    88: (48, 16, 100),
    89: (48, 24, 100),
    90: (64, 32, 228),
    100: (64, 32, 228),
    103: (64, 32, 228),
    110: (48, 24, 228),
    120: (48, 24, 100),
    121: (48, 24, 100),
}
_WARP, _REGISTERS, _PARTITIONS = 32, 65536, 4
_REGISTER_UNIT, _SHARED_UNIT, _RESERVED_SHARED = 256, 128, 1024


@dataclass(frozen=True)
class KernelUsage:
    """One kernel for one architecture; sizes in bytes, per thread or per block.

    Attributes:
        kernel: the mangled name.
        arch: as in ``"90a"``.
        registers: of a thread.
        stack: of a thread, spills included.
        spill_stores, spill_loads: bytes that spilling writes and reads.
        shared: static shared memory of a block; what a launch asks for comes on top.
    """

    kernel: str
    arch: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def spilled(self) -> int:
        """Bytes that spilling writes and reads, together."""
        return self.spill_stores + self.spill_loads

    @property
    def name(self) -> str:
        """The kernel's demangled name."""
        return demangle(self.kernel)

    @property
    def short_name(self) -> str:
        """The name without the parameters, which follow from the template arguments."""
        name = self.name.removeprefix("void ")
        depth = 0
        for index, char in enumerate(name):
            depth += (char == "<") - (char == ">")
            if char == "(" and depth == 0 and not name[index:].startswith("(anonymous namespace)"):
                return name[:index]
        return name


@dataclass(frozen=True)
class Occupancy:
    """Blocks that fit on an SM, and their share of its warps.

    ``limit`` is the limiting resource: ``"registers"``, ``"shared memory"``, ``"blocks"`` or
    ``"warps"``. If no block fits, the kernel cannot be launched with these sizes.
    """

    blocks: int
    occupancy: float
    limit: str


def split_usage(text: str) -> tuple[list[KernelUsage], str]:
    """The kernels in the output of ``nvcc --resource-usage``, and the rest of the output."""
    kernels: list[KernelUsage] = []
    rest: list[str] = []
    entry: tuple[str, str] | None = None
    current = ""
    stack = (0, 0, 0)
    for line in text.splitlines():
        if match := _ENTRY.match(line):
            entry = (match[1], match[2])
        elif match := _OF.match(line):
            current = match[1]
        elif match := _STACK.match(line):
            # Functions that are called and not inlined are listed too.
            if entry is not None and current == entry[0]:
                stack = (int(match[1]), int(match[2]), int(match[3]))
        elif match := _USED.match(line):
            if entry is not None:
                shared = _SHARED.search(match[2])
                kernels.append(
                    KernelUsage(*entry, int(match[1]), *stack, int(shared[1]) if shared else 0)
                )
            entry, stack = None, (0, 0, 0)
        elif not _OTHER.match(line):
            rest.append(line)
    return kernels, "\n".join(rest)


def occupancy(usage: KernelUsage, threads: int, dynamic_shared: int = 0) -> Occupancy | None:
    """How many blocks of ``threads`` fit on an SM.

    ``None`` for an architecture whose limits are unknown.

    Raises:
        ValueError: ``threads`` is not 1 to 1024, or ``dynamic_shared`` negative.
    """
    if not 1 <= threads <= 1024:
        raise ValueError(f"threads: {threads} is not a size of a block; give 1 to 1024.")
    if dynamic_shared < 0:
        raise ValueError(f"dynamic_shared: {dynamic_shared} is negative; give bytes.")
    limits = _LIMITS.get(int(re.sub(r"\D.*", "", usage.arch)))
    if limits is None:
        return None
    most_warps, most_blocks, shared_kib = limits
    warps = -(-threads // _WARP)
    fits = {"blocks": most_blocks, "warps": most_warps // warps}
    # Registers are allocated to whole warps, and warps to partitions.
    of_a_warp = _round_up(usage.registers * _WARP, _REGISTER_UNIT)
    fits["registers"] = (
        _REGISTERS // _PARTITIONS // of_a_warp * _PARTITIONS // warps
        if of_a_warp * _round_up(warps, _PARTITIONS) <= _REGISTERS
        else 0
    )
    asked = usage.shared + dynamic_shared
    of_a_block = _round_up(asked + _RESERVED_SHARED, _SHARED_UNIT)
    whole = shared_kib * 1024
    fits["shared memory"] = whole // of_a_block if asked <= whole - _RESERVED_SHARED else 0
    limit = min(fits, key=lambda what: fits[what])
    return Occupancy(fits[limit], fits[limit] * warps / most_warps, limit)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
