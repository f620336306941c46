"""`TokenLoader`: one rank's shard of a token stream as tensors on its device, prefetched on a background thread.

Micro-batch m of all ranks together is a contiguous part of the stream: `size * batch_size` windows, of which rank r
takes the r-th `batch_size`. The position is therefore a number of windows, and an optimizer step consists of the same
windows for any world size and micro-batch size.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from piledriver.core.errors import UsageError
from piledriver.data.cursor import Cursor
from piledriver.data.stream.token_stream import TokenStream
from piledriver.data.stream.windows.batch import IGNORED, WindowBatch


@dataclass(frozen=True)
class TokenBatch:
    """A micro-batch on the device."""

    inputs: torch.Tensor
    """(windows, seq_len) int64 ids."""
    labels: torch.Tensor
    """(windows, seq_len) int64 ids to predict; -100 for padding."""
    cu_seqlens: torch.Tensor
    """int32 cumulative lengths of the documents in the flattened batch, for variable-length attention."""
    max_seqlen: int
    """Length of the longest document in the batch."""
    index: int
    """Index of the first window in the endless stream."""

    def document_ids(self) -> torch.Tensor:
        """Return (windows, seq_len) document numbers: tokens attend to each other if theirs are equal."""
        marks = torch.zeros(self.inputs.numel(), dtype=torch.int32, device=self.inputs.device)
        marks.index_fill_(0, self.cu_seqlens[:-1].long(), 1)  # an indexed assignment would synchronise
        return (marks.cumsum(0, dtype=torch.int32) - 1).view(self.inputs.shape)

    def positions(self) -> torch.Tensor:
        """Return (windows, seq_len) int64 position of each token in its document."""
        starts = self.cu_seqlens[:-1].long()
        place = torch.arange(self.inputs.numel(), device=self.inputs.device)
        return (place - starts[self.document_ids().flatten().long()]).view(self.inputs.shape)


class TokenLoader:
    """An endless iterator of `TokenBatch`. `cursor` is the first window that was not yielded yet."""

    def __init__(
        self,
        stream: TokenStream,
        *,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        cursor: Cursor | None = None,
        device: torch.device | str = "cpu",
        prefetch: int = 2,
    ) -> None:
        if batch_size < 1 or not 0 <= rank < size or prefetch < 0:
            raise UsageError(
                f"batch_size is {batch_size}, rank {rank} of {size}, prefetch {prefetch}",
                fix="use batch_size >= 1, 0 <= rank < size and prefetch >= 0",
            )
        self.stream, self.batch_size, self.rank, self.size = stream, batch_size, rank, size
        self.device = torch.device(device)
        self.prefetch = prefetch
        self._next = stream.index_of(cursor or stream.start)

    @property
    def cursor(self) -> Cursor:
        """The position after every window that was yielded, on all ranks."""
        return self.stream.advance(self.stream.start, self._next)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor as 24 bytes."""
        return {"cursor": self.cursor.to_bytes()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved cursor at the next iteration; it may come from another world size."""
        self._next = self.stream.index_of(Cursor.from_bytes(state_dict["cursor"]))

    def __iter__(self) -> Iterator[TokenBatch]:
        step = self.batch_size * self.size
        with closing(self._prefetch(self._next) if self.prefetch else self._read(self._next)) as batches:
            for batch in batches:
                # Advance first: a state that is saved while the caller holds the batch is the one after it.
                self._next = batch.index - self.rank * self.batch_size + step
                if self.device.type == "cuda":
                    # The copy ran on another stream; later work on this one waits for it.
                    torch.cuda.current_stream(self.device).wait_stream(self._copy_stream())
                    for tensor in (batch.inputs, batch.labels, batch.cu_seqlens):
                        tensor.record_stream(torch.cuda.current_stream(self.device))
                yield batch

    def _read(self, first: int) -> Generator[TokenBatch]:
        for index in self._indices(first):
            yield self._make(index)

    def _indices(self, first: int) -> Iterator[int]:
        while True:
            yield first + self.rank * self.batch_size
            first += self.batch_size * self.size

    def _make(self, index: int) -> TokenBatch:
        windows = self.stream.read(index, self.batch_size)
        if self.device.type != "cuda":
            return to_tensors(windows, index, self.device)
        with torch.cuda.stream(self._copy_stream()):
            return to_tensors(windows, index, self.device)

    def _copy_stream(self) -> torch.cuda.Stream:
        if not hasattr(self, "_stream"):
            self._stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._stream

    def _prefetch(self, first: int) -> Generator[TokenBatch]:
        ready: queue.Queue[TokenBatch | BaseException] = queue.Queue(maxsize=self.prefetch)
        stopped = threading.Event()

        def work() -> None:
            for index in self._indices(first):
                try:
                    item: TokenBatch | BaseException = self._make(index)
                except BaseException as error:
                    item = error
                while not stopped.is_set():
                    try:
                        ready.put(item, timeout=0.1)
                        break
                    except queue.Full:
                        continue
                if stopped.is_set() or isinstance(item, BaseException):
                    return

        thread = threading.Thread(target=work, name="piledriver token loader", daemon=True)

        def stop() -> None:
            stopped.set()
            thread.join()

        # At interpreter exit an open iterator must not have its thread killed inside torch.
        atexit.register(stop)
        thread.start()
        try:
            while True:
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            atexit.unregister(stop)
            stop()


def to_tensors(windows: WindowBatch, index: int, device: torch.device) -> TokenBatch:
    """Copy windows to a device: as the shards' small ids, through pinned memory for CUDA."""
    edges = windows.cu_seqlens()
    longest = int(np.diff(edges).max(initial=0))
    cu_seqlens = _copy(torch.from_numpy(edges), device)
    if windows.used is None:
        # Inputs and labels are views of one array: copy it once.
        rows = _ids(windows.inputs.base if windows.inputs.base is not None else windows.inputs, device)
        return TokenBatch(rows[:, :-1], rows[:, 1:], cu_seqlens, longest, index)
    labels = _ids(windows.labels, device)
    mask = _copy(torch.from_numpy(windows.loss_mask()), device)
    return TokenBatch(_ids(windows.inputs, device), labels.masked_fill(~mask, IGNORED), cu_seqlens, longest, index)


def _ids(array: Any, device: torch.device) -> torch.Tensor:
    # Copy as signed integers of the same width, which every torch build can widen, and mask off the sign.
    bits = 8 * array.dtype.itemsize
    signed = torch.from_numpy(array.view(np.dtype(f"<i{array.dtype.itemsize}")))
    return torch.bitwise_and(_copy(signed, device).to(torch.int64), (1 << bits) - 1)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
