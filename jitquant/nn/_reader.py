"""Reads tensors of files, and meanwhile those that are needed next."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from jitquant.nn._safetensors import Entry, memory_of

_REQUESTS = 4  # at a time: one alone leaves a fast disk idle between two
_CHUNK = 8 << 20  # bytes of a request
HOST = torch.device("cpu")


class Part(NamedTuple):
    """A tensor of a file, or a part of one that is contiguous there."""

    path: Path
    entry: Entry


class _Reading(NamedTuple):
    values: Tensor
    chunks: list[Future[None]]


class Reader:
    """Reads parts of files, in threads of its own.

    `expect` says what will be asked for. It is read before, as long as ``ahead`` bytes are not
    exceeded, or one part that is larger. Other parts are read when they are asked for.

    Attributes:
        waited: the seconds that `read` took.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self._threads = ThreadPoolExecutor(_REQUESTS)
        self._expected: dict[Part, torch.device] = {}
        self._begun: dict[Part, _Reading] = {}
        self._ahead = self._bytes = 0
        self._pinned = threading.local()

    def expect(self, parts: Mapping[Part, torch.device], ahead: int) -> None:
        """Begins to read parts to a device each, in this order. Forgets what was expected."""
        for reading in self._begun.values():
            for chunk in reading.chunks:
                chunk.cancel()
        self._begun.clear()
        self._expected, self._ahead, self._bytes = dict(parts), ahead, 0
        self._read_ahead()

    def read(self, part: Part, device: torch.device = HOST) -> Tensor:
        """The values of a part on a device.

        Raises:
            OSError: the file cannot be read, or became shorter.
        """
        began = time.perf_counter()
        if part in self._begun:
            reading = self._begun.pop(part)
            self._bytes -= part.entry.size
        else:
            self._expected.pop(part, None)
            reading = self._begin(part, device)
        self._read_ahead()
        for chunk in reading.chunks:
            chunk.result()
        self.waited += time.perf_counter() - began
        return reading.values.view(part.entry.dtype).view(part.entry.shape).to(device)

    def close(self) -> None:
        """Ends the threads, which read nothing more."""
        self._threads.shutdown(cancel_futures=True)

    def _read_ahead(self) -> None:
        while self._expected:
            part = next(iter(self._expected))
            if self._begun and self._bytes + part.entry.size > self._ahead:
                return
            self._begun[part] = self._begin(part, self._expected.pop(part))
            self._bytes += part.entry.size

    def _begin(self, part: Part, device: torch.device) -> _Reading:
        size = part.entry.size
        with torch.inference_mode(False):  # other threads, which are not in it, write to the tensor
            values = torch.empty(size, dtype=torch.uint8, device=device)
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        chunks = [
            self._threads.submit(self._read, part, values, first, stream)
            for first in range(0, size, _CHUNK)
        ]
        return _Reading(values, chunks)

    def _read(
        self, part: Part, values: Tensor, first: int, stream: torch.cuda.Stream | None
    ) -> None:
        chunk = values[first : first + _CHUNK]
        begin = part.entry.begin + first
        if stream is None:
            read_bytes(part.path, begin, chunk)
            return
        # Pinned memory that is used again: a first write to memory takes longer than the copy.
        if not hasattr(self._pinned, "bytes"):
            self._pinned.bytes = torch.empty(
                _CHUNK, dtype=torch.uint8, device=HOST, pin_memory=True
            )
        pinned = self._pinned.bytes[: len(chunk)]
        read_bytes(part.path, begin, pinned)
        with torch.cuda.stream(stream):
            chunk.copy_(pinned)


def read_bytes(path: Path, begin: int, values: Tensor) -> None:
    """Fills a tensor of bytes in host memory from a place in a file.

    Raises:
        OSError: the file ends before.
    """
    view = memory_of(values)
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        read = 0
        while read < len(view):
            count = file.readinto(view[read:])
            if not count:
                raise OSError(f"{path} ended after {begin + read} bytes")
            read += count
