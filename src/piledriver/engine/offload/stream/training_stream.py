"""Stream the blocks of a model that trains, in the forward and in the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from piledriver.engine.offload.master import MasterWeight
from piledriver.engine.offload.stream.block_stream import BACKWARD, FORWARD, BlockStream
from piledriver.engine.offload.stream.depth import window_bytes
from piledriver.engine.offload.stream.hooks import attach_stream, detach_stream
from piledriver.engine.offload.stream.parameter_block import (
    ParameterBlock,
    StorageMemory,
    StreamedParameter,
    StreamHome,
)
from piledriver.engine.torch_private import current_backward

# Blocks ahead at most. From host memory one is enough; reads from disk vary more.
_DEEPEST_HOST, _DEEPEST_DISK = 1, 2


class TrainingStream:
    """The blocks of one model, in order: the one that computes and those that come next are on the device."""

    def __init__(self, blocks: list[nn.Module], masters: dict[nn.Parameter, MasterWeight], home: StreamHome) -> None:
        self.modules = blocks
        self.memory = StorageMemory(home.device, home.store)
        self.blocks = [
            ParameterBlock(
                f"block {number}", [StreamedParameter(masters[p], home) for p in held if p in masters], self.memory
            )
            for number, held in enumerate(streamed_parameters(blocks))
        ]
        # Nothing is fetched ahead of the end of a pass: the optimizer may step before the next one.
        deepest = _DEEPEST_HOST if home.store is None else _DEEPEST_DISK
        self.stream = BlockStream(self.blocks, home.device, deepest=deepest, cyclic=False, make_room=self._make_room)
        self._make_room(self.stream.depth)
        self._backward: int | None = None
        self._computing: int | None = None
        """The block whose backward runs."""
        for number, block in enumerate(blocks):
            attach_stream(block, self, number)

    def _make_room(self, depth: int) -> bool:
        return self.memory.resize(window_bytes([block.nbytes for block in self.blocks], depth))

    @property
    def weights(self) -> dict[nn.Parameter, StreamedParameter]:
        """The streamed weights, by parameter."""
        return {weight.master.parameter: weight for block in self.blocks for weight in block.weights}

    def before(self, number: int, _args: Any, _kwargs: Mapping[str, Any]) -> None:
        """See `CalledStream`."""
        self.stream.need(number, FORWARD)

    def after(self, number: int, out: Any) -> None:
        """See `CalledStream`. Where autograd records, the block comes back when a gradient of its output arrives."""
        given = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if given and torch.is_grad_enabled():
            torch.autograd.graph.register_multi_grad_hook(given, self._reached(number), mode="any")
        self.stream.done(number, FORWARD)

    def _reached(self, number: int) -> Callable[[Tensor], None]:
        return lambda _gradient: self._compute_backward(number)

    def _compute_backward(self, number: int) -> None:
        backward = current_backward()
        if backward != self._backward:
            # Also after a failed backward, whose final callback never ran.
            self._backward = backward
            Variable._execution_engine.queue_callback(self.evict_all)
        if number == self._computing:
            return
        if self._computing is not None:
            self.stream.done(self._computing, BACKWARD)
        self._computing = None
        self.stream.need(number, BACKWARD)
        self._computing = number

    def evict_all(self) -> None:
        """Free the device memory of all blocks: a backward has ended, or weights change."""
        self._backward = self._computing = None
        self.stream.release_all()
        # Sources in host memory may be written next.
        self.memory.link.synchronize()

    def release(self) -> None:
        """Remove the hooks, free the device memory and end the threads."""
        for block in self.modules:
            detach_stream(block, self)
        self.evict_all()
        self.memory.link.close()


def streamed_parameters(blocks: list[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the parameters of each block that no other block shares."""
    counts: dict[nn.Parameter, int] = {}
    for block in blocks:
        for parameter in block.parameters():
            counts[parameter] = counts.get(parameter, 0) + 1
    return [[one for one in block.parameters() if counts[one] == 1] for block in blocks]
