"""Gradients leave the device one by one as the backward makes them, while it makes the others.

A copy to pinned memory runs on a stream of its own; a thread waits for it and adds it to the master's gradient in fp32.
When `backward` returns all of them are there, so clipping and the step see what they always see.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from piledriver.engine.offload.master import MasterWeight
from piledriver.engine.shards.grad_hooks import when_accumulated
from piledriver.engine.torch_private import current_backward
from piledriver.optim.shards import local_gradient

# Pinned memory that may be on its way at once.
MOST_BYTES_UNDERWAY = 1 << 30


class GradientStream:
    """Takes gradients to the masters of one model."""

    def __init__(self, masters: list[MasterWeight]) -> None:
        self._masters = {master.parameter: master for master in masters}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="gradients-to-host")
        self._underway: deque[tuple[int, Future[None]]] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._backward: int | None = None
        self.handles = [
            when_accumulated(parameter, self._leave) for parameter in self._masters if parameter.requires_grad
        ]

    def _leave(self, parameter: nn.Parameter) -> None:
        backward = current_backward()
        if backward != self._backward:
            # Also where the one before broke off, which had no end to be told of.
            self.settle()
            self._backward = backward
            Variable._execution_engine.queue_callback(self.settle)
        gradient = local_gradient(parameter)
        parameter.grad = None
        staged, arrived = self._copy(gradient)
        future = self._worker.submit(_add, self._masters[parameter], staged, arrived)
        self._underway.append((gradient.nbytes, future))
        while sum(size for size, _ in self._underway) > MOST_BYTES_UNDERWAY:
            self._underway.popleft()[1].result()

    def _copy(self, gradient: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if not gradient.is_cuda:
            return gradient, None
        if gradient.device not in self._streams:
            self._streams[gradient.device] = torch.cuda.Stream(gradient.device)  # type: ignore[no-untyped-call]
        stream = self._streams[gradient.device]
        staged = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(stream):
            staged.copy_(gradient, non_blocking=True)
            arrived = stream.record_event()
        gradient.record_stream(stream)
        return staged, arrived

    def settle(self) -> None:
        """Wait until all gradients are beside their masters."""
        self._backward = None
        while self._underway:
            self._underway.popleft()[1].result()

    def close(self) -> None:
        """Gradients stay on the device again."""
        self.settle()
        for handle in self.handles:
            handle.remove()
        self._worker.shutdown()


def _add(master: MasterWeight, staged: Tensor, arrived: torch.cuda.Event | None) -> None:
    if arrived is not None:
        arrived.synchronize()
    master.add_gradient(staged)
