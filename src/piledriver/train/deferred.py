"""Scalars copied from the device without waiting, and read later."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor


class DeferredScalars:
    """A vector of scalars on a device. Construction starts an asynchronous copy to the host; `read` waits for it.

    >>> DeferredScalars(torch.tensor([1.5, 2.0])).read()
    [1.5, 2.0]
    """

    def __init__(self, values: Tensor) -> None:
        self._host = values
        self._copied: Any = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._copied.record()
        self.ready_at: float | None = None if values.is_cuda else time.monotonic()
        """`time.monotonic()` of the first `read`, or of construction on a CPU; None before."""

    def is_ready(self) -> bool:
        """Return whether `read` would not wait."""
        return self._copied is None or bool(self._copied.query())

    def seconds_since(self, earlier: DeferredScalars) -> float:
        """Return the time between two sets of values that were read: the device's, however late the host reads them."""
        if self._copied is not None and earlier._copied is not None:
            return float(earlier._copied.elapsed_time(self._copied)) / 1000
        return (self.ready_at or 0.0) - (earlier.ready_at or 0.0)

    def read(self) -> list[float]:
        """Wait for the copy and return the values."""
        if self._copied is not None:
            self._copied.synchronize()
        if self.ready_at is None:
            self.ready_at = time.monotonic()
        numbers: list[float] = self._host.tolist()
        return numbers
