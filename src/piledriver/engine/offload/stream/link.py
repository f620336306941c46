"""`DeviceLink`: bring the weights of a block to a device, by copies from host memory and by reads from disk.

On a GPU all copies run on one stream beside the one that computes. The streams of inference (`weight_block.py`) and of
training (`parameter_block.py`) differ in the memory that weights arrive in, not in how they come.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from piledriver.engine.offload.disk.block_file import Region
from piledriver.engine.offload.disk.direct_io import DirectIO, Transfer
from piledriver.engine.offload.disk.extents import Extent
from piledriver.engine.offload.disk.reader import DirectReader

Copy = tuple[Tensor, Tensor]
"""A tensor in host memory, and the one of as many elements that it is copied to."""
Read = tuple[Extent | Region, Tensor]
"""Bytes of a file, and the tensor that they are read into."""


class Arrival:
    """The weights of one block on their way."""

    def __init__(self, device: torch.device, copies: torch.cuda.Stream | None) -> None:
        self._device, self._copies = device, copies
        self._reading: Transfer | None = None
        self._assembled: Future[None] | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._seconds: float | None = None
        self._was_awaited = False

    def wait(self) -> None:
        """Wait for reads, raising what failed, and let what is computed next wait for the copies."""
        if self._assembled is not None:
            self._assembled.result()
        if self._reading is not None:
            self._reading.wait()
        self._was_awaited = True
        if self._copies is None:
            return
        arrived = self._events[1] if self._events is not None else None
        if self._reading is not None:
            arrived = self._reading.arrived or self._copies.record_event()
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)

    def settle(self) -> None:
        """Let nothing write into the memory after what is computed so far: for weights that were not used after all."""
        if self._was_awaited:
            return
        for late in (self._assembled, self._reading):
            # What failed is raised by `wait`, if the weights are used.
            with suppress(Exception):
                if isinstance(late, Transfer):
                    late.wait()
                elif late is not None:
                    late.result()
        with suppress(Exception):
            self.wait()

    @property
    def seconds(self) -> float | None:
        """How long it took; None if not known yet."""
        if self._reading is not None:
            return self._reading.seconds or None
        if self._events is not None and self._events[1].query():  # type: ignore[no-untyped-call]
            self._seconds = self._events[0].elapsed_time(self._events[1]) / 1000
        return self._seconds


class DeviceLink:
    """The copy stream of a device and the reader of the disk tier, made when first needed."""

    def __init__(self, device: torch.device, io: DirectIO | None = None) -> None:
        """Read with the threads of `io`, by default with new ones."""
        self.device, self._io = device, io
        self.copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._reader: DirectReader | None = None
        self._assembler: ThreadPoolExecutor | None = None

    def send(
        self,
        copies: Sequence[Copy],
        reads: Sequence[Read],
        *,
        after: Sequence[torch.cuda.Event] = (),
        assemble: Callable[[], None] | None = None,
    ) -> Arrival:
        """Start copies and reads, on a GPU after some events; `assemble` runs in a thread once reads are done."""
        arrival = Arrival(self.device, self.copies)
        if self.copies is None:
            self._start(arrival, copies, reads, assemble)
            return arrival
        for event in after:
            self.copies.wait_event(event)
        with torch.cuda.stream(self.copies):
            self._start(arrival, copies, reads, assemble)
        return arrival

    def _start(
        self, arrival: Arrival, copies: Sequence[Copy], reads: Sequence[Read], assemble: Callable[[], None] | None
    ) -> None:
        begun, start = time.perf_counter(), self._mark()
        for source, target in copies:
            target.copy_(source, non_blocking=True)
        if reads:
            arrival._reading = self.reader.read(reads, self.copies)
        elif start is not None:
            arrival._events = start, self._mark()
        else:
            arrival._seconds = time.perf_counter() - begun
        if assemble is not None and arrival._reading is not None:
            arrival._assembled = self._thread.submit(self._assemble, arrival._reading, assemble)

    @torch.no_grad()
    def _assemble(self, reading: Transfer, assemble: Callable[[], None]) -> None:
        reading.wait()
        if self.copies is None:
            assemble()
            return
        with torch.cuda.stream(self.copies):
            assemble()
            reading.arrived = self.copies.record_event()

    def _mark(self) -> Any:
        if self.copies is None:
            return None
        return self.copies.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    @property
    def reader(self) -> DirectReader:
        """The reader of the disk tier."""
        if self._reader is None:
            self._reader = DirectReader(self._io)
        return self._reader

    @property
    def _thread(self) -> ThreadPoolExecutor:
        if self._assembler is None:
            self._assembler = ThreadPoolExecutor(1, thread_name_prefix="assemble")
            weakref.finalize(self, self._assembler.shutdown, wait=False)
        return self._assembler

    def synchronize(self) -> None:
        """Wait until all copies are done."""
        if self.copies is not None:
            self.copies.synchronize()

    def close(self) -> None:
        """End the threads of the reader and close its files."""
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceLink:
        return DeviceLink(self.device, self._io)
