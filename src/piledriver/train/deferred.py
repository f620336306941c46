"""Numbers on their way from the device: asked for now, read when somebody needs them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor


class DeferredScalars:
    """A few numbers of a device. Making one does not wait for them; `read` does.

    >>> DeferredScalars(torch.tensor([1.5, 2.0])).read()
    [1.5, 2.0]
    """

    def __init__(self, values: Tensor) -> None:
        self._host = values
        self._copied: Any = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        self.there_at: float | None = None if values.is_cuda else time.monotonic()
        """When the numbers were known, by this machine's clock; None as long as nobody has looked."""

    def is_there(self) -> bool:
        """Whether `read` would not wait."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> list[float]:
        """The numbers, once the device has them."""
        if self._copied is not None:
            self._copied.synchronize()
        if self.there_at is None:
            self.there_at = time.monotonic()
        numbers: list[float] = self._host.tolist()
        return numbers
