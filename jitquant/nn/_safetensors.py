"""Files of safetensors, one tensor at a time.

The format (https://github.com/huggingface/safetensors): 8 bytes, the length of a header in JSON,
the header, and the tensors' bytes, which ``data_offsets`` finds.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST = 100 << 20  # bytes of a header, as in the library
_SYNCED = 256 << 20  # bytes that the disk may lag behind


class Entry(NamedTuple):
    """A tensor of a file.

    Attributes:
        dtype, shape: of the tensor.
        begin, size: bytes in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    size: int


def _read_json(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and where its tensors begin."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= _LONGEST or 8 + length > size:
            raise ValueError(
                f"{path}: expected a file of safetensors, got {size} bytes and no header of "
                "safetensors. Download it again"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(
                f"{path}: expected a header in JSON, got {error}. Download it again"
            ) from error
    if not isinstance(header, dict):
        raise ValueError(
            f"{path}: expected a JSON object as header, got a {type(header).__name__}. Download it "
            "again"
        )
    return header, 8 + length


def read_metadata(path: Path) -> dict[str, str]:
    """The texts that a file has beside its tensors; none if they are broken.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a safetensors file.
    """
    found = _read_json(path)[0].get("__metadata__")
    every = found.items() if isinstance(found, dict) else ()
    return {name: text for name, text in every if isinstance(text, str)}


def read_header(path: Path) -> dict[str, Entry]:
    """What is in a file, without its values.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is truncated or too long, or no file of safetensors.
    """
    size = path.stat().st_size
    header, first = _read_json(path)
    header.pop("__metadata__", None)
    entries: dict[str, Entry] = {}
    for name, about in header.items():
        try:
            begin, end = map(int, about["data_offsets"])
            kind, shape = str(about["dtype"]), tuple(map(int, about["shape"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{name} in {path}: expected dtype, shape and data_offsets, got {about!r}. "
                "Download it again"
            ) from error
        if kind not in DTYPES:
            raise ValueError(f"{name} in {path}: expected one of {', '.join(DTYPES)}, got {kind}")
        if begin < 0 or any(size < 0 for size in shape):
            raise ValueError(
                f"{name} in {path}: expected a shape and an offset of 0 or more, got {shape} at "
                f"{begin}. Download it again"
            )
        dtype = DTYPES[kind]
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{name} in {path}: expected {math.prod(shape) * dtype.itemsize} bytes for {shape} "
                f"of {dtype}, got {end - begin}. Download it again"
            )
        entries[name] = Entry(dtype, shape, first + begin, end - begin)
    needed = max((e.begin + e.size for e in entries.values()), default=first)
    if size != needed:
        why = "it is truncated" if size < needed else "more follows its tensors"
        raise ValueError(
            f"{path}: expected {needed} bytes, got {size}: {why}. Copy or download it again"
        )
    return entries


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, which has to outlive this."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


class Writer:
    """A file of tensors whose names, dtypes and shapes are known before their values.

    It is written beside its name, and takes it in `close`. Other threads write and hash tensors
    while the next ones are computed.

    Attributes:
        waited: the seconds that `write` and `close` waited for these threads.
    """

    def __init__(
        self,
        path: Path,
        layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        behind: int = 0,
    ) -> None:
        """Writes the header.

        Args:
            path: of the file.
            layout: dtype and shape of each tensor, in the order that they will be written.
            behind: bytes that may wait to be written, or one tensor that is larger.
        """
        self.path, self.layout = path, dict(layout)
        self.waited = 0.0
        self._beside = path.with_name(path.name + ".tmp")
        self._coming = list(self.layout)
        self._rows = 0  # that the next one has already
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begin = 0
        for name, (dtype, shape) in self.layout.items():
            end = begin + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
            begin = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._digest = hashlib.sha256()
        self._file = self._beside.open("wb", buffering=0)
        self._writer, self._hasher, self._syncer = (ThreadPoolExecutor(1) for _ in range(3))
        self._waiting: deque[tuple[Tensor, list[Future[None]]]] = deque()
        self._bytes, self._behind = 0, behind
        self._unsynced = 0
        self._syncing: Future[None] | None = None
        start = bytearray(struct.pack("<Q", len(text)) + text)
        self._queue(torch.frombuffer(start, dtype=torch.uint8))

    def write(self, name: str, tensor: Tensor) -> None:
        """The next tensor of the layout, whole or some of its first dimension at a time.

        Raises:
            ValueError: it is another one.
        """
        if not self._coming or self._coming[0] != name:
            raise ValueError(
                f"name: expected {', '.join(self._coming[:1]) or 'no more'}, the next tensor of "
                f"the layout, got {name}"
            )
        dtype, shape = self.layout[name]
        size = shape[0] if shape else 0
        rows = self._rows + (len(tensor) if tensor.dim() else 0)
        rest = tuple(tensor.shape[1:]) == shape[1:] and tensor.dim() == len(shape)
        if tensor.dtype != dtype or not rest or rows > size:
            raise ValueError(
                f"{name}: expected {self.layout[name]}, as in the layout, got {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
        self._queue(tensor.contiguous().cpu())
        self._rows = rows
        if rows == size:
            del self._coming[0]
            self._rows = 0

    def _queue(self, tensor: Tensor) -> None:
        if tensor.numel() == 0:
            return
        self._wait(max(0, self._behind - tensor.nbytes))
        data = memory_of(tensor)
        jobs = [
            self._writer.submit(self._write, data),
            self._hasher.submit(self._digest.update, data),
        ]
        self._waiting.append((tensor, jobs))
        self._bytes += tensor.nbytes

    def _write(self, data: memoryview) -> None:
        written = 0
        while written < len(data):
            written += self._file.write(data[written : written + (1 << 30)])
        self._unsynced += len(data)
        if self._unsynced >= _SYNCED:  # or the disk would have everything to do in `close`
            self._wait_for_sync()
            self._syncing = self._syncer.submit(os.fsync, self._file.fileno())
            self._unsynced = 0

    def _wait_for_sync(self) -> None:
        if self._syncing is not None:
            self._syncing.result()

    def _wait(self, most: int) -> None:
        """Until at most some bytes wait to be written. Raises what went wrong."""
        began = time.perf_counter()
        while self._bytes > most:
            tensor, jobs = self._waiting.popleft()
            self._bytes -= tensor.nbytes
            for job in jobs:
                job.result()
        self.waited += time.perf_counter() - began

    def close(self) -> str:
        """Gives the file its name, when its bytes are on the disk, and returns its SHA-256."""
        if self._coming:
            raise ValueError(
                f"{', '.join(self._coming)}: expected to be written before the end, got no values"
            )
        self._wait(0)
        self._wait_for_sync()
        os.fsync(self._file.fileno())
        self._end_threads()
        self._file.close()
        self._beside.replace(self.path)
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Leaves nothing behind."""
        self._end_threads()
        self._file.close()
        self._beside.unlink(missing_ok=True)

    def _end_threads(self) -> None:
        for thread in (self._writer, self._hasher, self._syncer):
            thread.shutdown(cancel_futures=True)


def safetensors_functions() -> tuple[Callable[..., dict[str, Tensor]], Callable[..., None]]:
    """``load_file`` and ``save_file`` of safetensors.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from safetensors.torch import load_file, save_file
    except ImportError as error:
        raise ImportError(
            "files of this layout need safetensors, which is not installed: pip install safetensors"
        ) from error
    return load_file, save_file
