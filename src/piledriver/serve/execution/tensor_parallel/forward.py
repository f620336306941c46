"""The forward pass over ranks: rank 0 broadcasts the inputs of each call, the others run the same call.

Other ranks hold shards of the weights and of the cache, and no state of requests: they follow whatever rank 0 runs. In
invariant mode partial sums are added in the order of ranks, so that a row's bits do not depend on where it stands in a
tensor.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from piledriver.kernels.paged_attention import PagedBatch
from piledriver.serve.errors import ServeError
from piledriver.serve.execution.forward import Forward

_STOP, _IDLE, _HIDDEN, _LOGITS = range(4)
_HEADER = 7
_IDLE_SECONDS = 20.0
"""Time between signs of life while nothing is served: collectives that wait have a timeout."""


class TensorParallelForward:
    """A `Forward` for rank 0."""

    captured: ClassVar[bool] = False

    def __init__(self, inner: Forward, device: torch.device, *, invariant: bool) -> None:
        self.inner, self.device, self.invariant = inner, device, invariant
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        threading.Thread(target=self._stay_in_touch, name="piledriver-ranks", daemon=True).start()

    def hidden(self, tokens: Tensor, positions: Tensor, batch: PagedBatch, rows: Tensor | None = None) -> Tensor:
        """See `Forward`."""
        fields = (tokens, positions, batch.slots, batch.starts, batch.contexts, batch.tables.flatten())
        numbers = torch.cat([field.long() for field in fields])
        sizes = [len(tokens), len(batch.contexts), batch.tables.shape[1], batch.max_new, batch.max_context]
        with self._together(_HIDDEN, *sizes, int(batch.invariant)):
            dist.broadcast(numbers, src=0)
            found = self.inner.hidden(tokens, positions, batch)
        return found if rows is None else found[rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Forward`."""
        with self._together(_LOGITS, *hidden.shape):
            dist.broadcast(_on_the_wire(hidden), src=0)
            return self.inner.logits(hidden)

    def close(self) -> None:
        """Let the other ranks return from `follow`."""
        if not self._closed.is_set():
            self._closed.set()
            if self._failure is None:
                with self._lock:
                    self._announce(_STOP)

    def _together(self, *header: int) -> AbstractContextManager[None]:
        return _Call(self, header)

    def _announce(self, *header: int) -> None:
        padded = [*header, *[0] * (_HEADER - len(header))]
        dist.broadcast(torch.tensor(padded, dtype=torch.int64, device=self.device), src=0)

    def _stay_in_touch(self) -> None:
        while not self._closed.wait(_IDLE_SECONDS):
            with self._lock:
                if self._closed.is_set() or self._failure is not None:
                    return
                try:
                    self._announce(_IDLE)
                except RuntimeError as error:
                    self._failure = error


class _Call:
    """One call on all ranks: a failure on rank 0 leaves the others inside a collective, so the group is lost."""

    def __init__(self, forward: TensorParallelForward, header: tuple[int, ...]) -> None:
        self.forward, self.header = forward, header
        self.sums = _sums(forward.invariant)

    def __enter__(self) -> None:
        self.forward._lock.acquire()
        if self.forward._failure is not None:
            self.forward._lock.release()
            raise ServeError(f"a rank was lost: {self.forward._failure}", fix="start the server again")
        self.sums.__enter__()
        self.forward._announce(*self.header)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.sums.__exit__(None, None, None)
        self.forward._failure = self.forward._failure or error
        self.forward._lock.release()
        if error is not None:
            raise ServeError(
                f"the ranks lost each other: {type(error).__name__}: {error}", fix="start again"
            ) from error


@torch.inference_mode()
def follow(inner: Forward, device: torch.device, dtype: torch.dtype, *, invariant: bool) -> None:
    """Run the calls of rank 0 until it closes its forward pass; for the other ranks."""
    header = torch.zeros(_HEADER, dtype=torch.int64, device=device)
    while True:
        dist.broadcast(header, src=0)
        what, *sizes = header.tolist()
        if what == _STOP:
            return
        if what == _IDLE:
            continue
        with _sums(invariant):
            if what == _LOGITS:
                hidden = _on_the_wire(torch.zeros(sizes[0], sizes[1], dtype=dtype, device=device))
                dist.broadcast(hidden, src=0)
                inner.logits(hidden.to(dtype))
            else:
                inner.hidden(*_receive_batch(sizes, device))


def _receive_batch(sizes: list[int], device: torch.device) -> tuple[Tensor, Tensor, PagedBatch]:
    count, rows, width, max_new, max_context, invariant = sizes
    lengths = [count, count, count, rows + 1, rows, rows * width]
    numbers = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
    dist.broadcast(numbers, src=0)
    tokens, positions, slots, starts, contexts, tables = torch.split(numbers, lengths)
    spans: tuple[tuple[int, int], ...] = ()
    if device.type == "cpu":
        spans = tuple(zip(starts.diff().tolist(), contexts.tolist(), strict=True))
    batch = PagedBatch(
        tables.int().view(rows, width),
        starts.int(),
        contexts.int(),
        slots,
        max_new,
        max_context,
        spans,
        bool(invariant),
    )
    return tokens, positions, batch


def _on_the_wire(hidden: Tensor) -> Tensor:
    """Return a tensor that every backend can broadcast: gloo has no 16-bit floats."""
    return hidden.float() if hidden.device.type == "cpu" else hidden.contiguous()


def _sums(invariant: bool) -> AbstractContextManager[None]:
    """Return a context in which partial sums are added in the order of ranks, if they must be."""
    if not invariant:
        return nullcontext()
    from piledriver.engine.shards.collectives import ordered_sums

    return ordered_sums()
