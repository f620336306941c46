"""Buffers through which blocks pass: read ahead, computed, written behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from piledriver.engine.offload.disk.direct_io import Transfer
from piledriver.engine.offload.disk.host_buffer import HostBuffer, whole_pages

B = TypeVar("B")


class Staged(NamedTuple):
    """A tensor in a buffer, and where it lies there."""

    tensor: Tensor
    buffer: HostBuffer
    offset: int


class Slot:
    """One buffer, which holds the tensors of one block at a time."""

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self.buffer, self._pin = HostBuffer(nbytes, pin=pin), pin
        self._used = 0
        self._extra: list[HostBuffer] = []
        self.staged: dict[Any, Staged] = {}
        self.sent: torch.cuda.Event | None = None
        """When the device has read the buffer."""

    def take(self, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Staged:
        """Return room for a tensor; a block that is larger than the buffer gets memory of its own."""
        size = whole_pages(max(torch.Size(shape).numel() * dtype.itemsize, 1))
        if self._used + size <= self.buffer.nbytes:
            buffer, offset = self.buffer, self._used
            self._used += size
        else:
            buffer, offset = HostBuffer(size, pin=self._pin), 0
            self._extra.append(buffer)
        self.staged[key] = Staged(buffer.tensor(offset, shape, dtype), buffer, offset)
        return self.staged[key]

    def clear(self) -> None:
        """Make room for the next block, after the device has read this one."""
        if self.sent is not None:
            self.sent.synchronize()
        self.sent, self._used, self._extra, self.staged = None, 0, [], {}


class SlotPipeline(Generic[B]):
    """Reads blocks ahead into free buffers, in order, on a thread of its own.

    A buffer is free again when its block was written, so as many blocks as there are buffers are underway.
    """

    def __init__(self, blocks: Iterable[B], slots: list[Slot], read: Callable[[B, Slot], list[Transfer]]) -> None:
        self._blocks, self._read = list(blocks), read
        self._free: SimpleQueue[Slot | None] = SimpleQueue()
        self._ready: SimpleQueue[tuple[Slot, list[Transfer]] | BaseException] = SimpleQueue()
        self._writes: list[Transfer] = []
        for slot in slots:
            self._free.put(slot)
        self._feeder = threading.Thread(target=self._feed, name="read-ahead", daemon=True)
        self._feeder.start()

    def _feed(self) -> None:
        try:
            for block in self._blocks:
                slot = self._free.get()
                if slot is None:
                    return
                slot.clear()
                self._ready.put((slot, self._read(block, slot)))
        except BaseException as error:
            self._ready.put(error)

    def next(self) -> Slot:
        """Return the buffer of the next block, once it was read."""
        came = self._ready.get()
        if isinstance(came, BaseException):
            raise came
        slot, reads = came
        for one in reads:
            one.wait()
        return slot

    def release(self, slot: Slot, writes: list[Transfer]) -> None:
        """Free a buffer when its writes are done."""
        if not writes:
            self._free.put(slot)
            return
        left = _CountDown(len(writes), lambda: self._free.put(slot))
        for one in writes:
            one.then(left)
        self._writes += writes

    def finish(self) -> None:
        """Wait for all writes; raise what failed."""
        for one in self._writes:
            one.wait()
        self.close()

    def close(self) -> None:
        """End the thread."""
        self._free.put(None)
        self._feeder.join()


class _CountDown:
    def __init__(self, count: int, call: Callable[[], None]) -> None:
        self._left, self._call, self._lock = count, call, threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._call()
