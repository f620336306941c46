"""Copy gradients to the host one by one, overlapped with the backward.

Copies to pinned memory run on their own stream; a thread adds each to the master's fp32 gradient. All are done when
`backward` returns.
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

# Limit of pinned memory in flight.
MOST_BYTES_UNDERWAY = 1 << 30


class GradientStream:
    """Copies the gradients of one model to its master weights."""

    def __init__(
        self, masters: list[MasterWeight], *, are_reduced_first: bool = False, most_bytes: int | None = None
    ) -> None:
        self._most = most_bytes
        self.accumulates = False
        """Whether gradients only add up (`no_sync`), also where blocks are stepped in the backward."""
        self._masters = {master.parameter: master for master in masters}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="gradients-to-host")
        self._underway: deque[tuple[int, Future[None]]] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._backward: int | None = None
        # With zero 1 and 2 the reducer passes on the rows that it has averaged.
        held = [] if are_reduced_first else [one for one in self._masters if one.requires_grad]
        self.handles = [when_accumulated(parameter, self._leave) for parameter in held]

    def _leave(self, parameter: nn.Parameter) -> None:
        backward = current_backward()
        # A pipeline schedule reduces shards after its last backward, and calls `collect`.
        if backward not in (self._backward, -1):
            # Also after a failed backward, whose final callback never ran.
            self.settle()
            self._backward = backward
            Variable._execution_engine.queue_callback(self.settle)
        self._send(parameter)

    def collect(self) -> None:
        """Send gradients that were set outside of a backward (of tied weights, by another stage), and settle."""
        for parameter in self._masters if self.handles else ():
            if parameter.grad is not None:
                self._send(parameter)
        self.settle()

    def _send(self, parameter: nn.Parameter) -> None:
        gradient = local_gradient(parameter)
        parameter.grad = None
        staged, arrived = self._copy(gradient)
        future = self._worker.submit(_add, self._masters[parameter], staged, arrived, not self.accumulates)
        self._underway.append((gradient.nbytes, future))
        while sum(size for size, _ in self._underway) > min(self._most or MOST_BYTES_UNDERWAY, MOST_BYTES_UNDERWAY):
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
        """Wait until all gradients are on the host."""
        self._backward = None
        while self._underway:
            self._underway.popleft()[1].result()

    def close(self) -> None:
        """Remove the hooks: gradients stay on the device."""
        self.settle()
        for handle in self.handles:
            handle.remove()
        self._worker.shutdown()


def _add(master: MasterWeight, staged: Tensor, arrived: torch.cuda.Event | None, is_complete: bool) -> None:
    if arrived is not None:
        arrived.synchronize()
    master.add_gradient(staged)
    if is_complete and master.stepper is not None:
        master.stepper.arrived(master)
