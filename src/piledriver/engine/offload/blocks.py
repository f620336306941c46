"""Stream block weights to the device while they compute, prefetching the next block.

Eviction frees the memory of a weight but keeps the tensor, so what the graph saved of it (views, transposes) is valid
again when the weight returns for the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from piledriver.engine.offload.master import MasterWeight
from piledriver.engine.offload.pinned import host_copy
from piledriver.engine.torch_private import current_backward


class StreamedBlocks:
    """The blocks of one model, in order. At most two of them are on the device."""

    def __init__(
        self, blocks: list[nn.Module], masters: dict[nn.Parameter, MasterWeight], device: torch.device
    ) -> None:
        counts: dict[nn.Parameter, int] = {}
        for block in blocks:
            for parameter in block.parameters():
                counts[parameter] = counts.get(parameter, 0) + 1
        self.weights = [
            [StreamedWeight(masters[p], device) for p in block.parameters() if counts[p] == 1 and p in masters]
            for block in blocks
        ]
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._backward: int | None = None
        self._handles = [
            handle
            for number, block in enumerate(blocks)
            for handle in (
                block.register_forward_pre_hook(_Before(self, number)),
                block.register_forward_hook(_After(self, number)),
            )
        ]
        for number in range(len(blocks)):
            self.evict(number)

    @property
    def streamed(self) -> dict[nn.Parameter, StreamedWeight]:
        """The streamed weights, by parameter."""
        return {weight.master.parameter: weight for block in self.weights for weight in block}

    def need(self, number: int, *, then: int) -> None:
        """Wait for a block's weights and start fetching those of block `then`."""
        self._fetch(number)
        for weight in self.weights[number]:
            if weight.arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(weight.arrived)
        if 0 <= then < len(self.weights):
            self._fetch(then)

    def _fetch(self, number: int) -> None:
        due = [weight for weight in self.weights[number] if not weight.is_here]
        if not due:
            return
        for weight in due:
            weight.allocate()
        if self.stream is None:
            for weight in due:
                weight.fill()
            return
        # The compute stream may still use this memory for what it held before.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for weight in due:
                weight.fill()
                weight.arrived = self.stream.record_event()

    def evict(self, number: int) -> None:
        """Free a block's device memory."""
        for weight in self.weights[number]:
            weight.release()

    def backward_reached(self, number: int) -> None:
        """Prepare a block's backward: fetch its weights, prefetch the previous block's, evict the others."""
        backward = current_backward()
        if backward != self._backward:
            # Also after a failed backward, whose final callback never ran.
            self._backward = backward
            Variable._execution_engine.queue_callback(self.evict_all)
        for other in range(len(self.weights)):
            if other not in (number, number - 1):
                self.evict(other)
        self.need(number, then=number - 1)

    def evict_all(self) -> None:
        """Free the device memory of all blocks."""
        self._backward = None
        for number in range(len(self.weights)):
            self.evict(number)

    def release(self) -> None:
        """Remove the hooks and free the device memory."""
        for handle in self._handles:
            handle.remove()
        self.evict_all()


class StreamedWeight:
    """One streamed weight and its source on the host."""

    def __init__(self, master: MasterWeight, device: torch.device) -> None:
        self.master = master
        parameter = master.parameter
        host = master.tensor.detach()
        self.source = host
        if parameter.dtype != host.dtype:
            self.source = host_copy(host, parameter.dtype, owner=self)
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        self._bytes = parameter.untyped_storage().nbytes()
        self.arrived: torch.cuda.Event | None = None

    @property
    def is_here(self) -> bool:
        """Whether the weight has memory on the device."""
        return self.master.parameter.untyped_storage().nbytes() > 0

    def allocate(self) -> None:
        """Allocate device memory."""
        self.master.parameter.untyped_storage().resize_(self._bytes)

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the weight in, without a version change: the graph sees the same values."""
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(self.master.parameter):
            self.master.parameter.copy_(self.source, non_blocking=True)

    def release(self) -> None:
        """Free the device memory, after any copy into it has finished."""
        if self.arrived is not None:
            torch.cuda.current_stream(self.master.device).wait_event(self.arrived)
        self.master.parameter.untyped_storage().resize_(0)
        self.arrived = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over a changed master weight."""
        if self.source.data_ptr() != self.master.tensor.data_ptr():
            self.source.copy_(self.master.tensor)
        self.release()
        self.master.sent()


class _Before:
    def __init__(self, blocks: StreamedBlocks, number: int) -> None:
        self.blocks, self.number = blocks, number

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        self.blocks.need(self.number, then=self.number + 1)


class _After:
    def __init__(self, blocks: StreamedBlocks, number: int) -> None:
        self.blocks, self.number = blocks, number

    def __call__(self, _module: nn.Module, _args: Any, out: Any) -> None:
        given = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if given and torch.is_grad_enabled():
            torch.autograd.graph.register_multi_grad_hook(given, self._reached(), mode="any")
        self.blocks.evict(self.number)

    def _reached(self) -> Callable[[Tensor], None]:
        return lambda _gradient: self.blocks.backward_reached(self.number)
