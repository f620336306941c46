"""Stream the shards of a model that trains with zero 3 (ZeRO-Infinity, Rajbhandari et al., 2021).

Each rank keeps its shard of every block in host memory or in a file. Before `fully_shard` all-gathers a block, in the
forward or in the backward, the shard is brought to the device; its memory is free again once the all-gather has read
it. Shards of the blocks that come next are read meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.offload.master import MasterWeight
from piledriver.engine.offload.stream.block_stream import BACKWARD, FORWARD, BlockStream
from piledriver.engine.offload.stream.depth import window_bytes
from piledriver.engine.offload.stream.parameter_block import (
    ParameterBlock,
    StorageMemory,
    StreamedParameter,
    StreamHome,
)
from piledriver.engine.torch_private import (
    FsdpShard,
    all_gather_stream,
    around_unshard,
    fsdp_groups_in,
    is_before_backward,
    replace_local,
    undo_around_unshard,
)
from piledriver.optim.shards import local

# Blocks ahead at most; reads from disk vary more than copies.
_DEEPEST_HOST, _DEEPEST_DISK = 1, 2


class StreamedShard(StreamedParameter):
    """This rank's shard of one parameter: the all-gather reads it, in the compute dtype, from memory that comes."""

    def __init__(self, master: MasterWeight, home: StreamHome, shard: FsdpShard) -> None:
        self.shard = shard
        super().__init__(master, home)

    def _make_target(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        part = self.master.part
        # The parameter keeps its dtype, shape and device, which gradients must match, and has no memory.
        replace_local(self.master.parameter, _without_memory(part.shape, self.master.parameter.dtype, device))
        return self.shard.gather_from(dtype, device)[: part.numel()].view(part.shape)

    def release(self) -> None:
        """Free the device memory, also what loading a state dict has given to the parameter."""
        super().release()
        local(self.master.parameter).untyped_storage().resize_(0)

    def give_back(self) -> None:
        """Let the parameter hold the master weight itself."""
        parameter = self.master.parameter
        replace_local(parameter, self.master.part.to(parameter.device, copy=True))
        self.shard.reset()


class ShardStream:
    """The sharded blocks of one model, in order: around each all-gather the shard of the block is on the device."""

    def __init__(self, blocks: list[nn.Module], masters: dict[nn.Parameter, MasterWeight], home: StreamHome) -> None:
        self.groups = [group for block in blocks for group in fsdp_groups_in(block)]
        self.memory = StorageMemory(home.device, home.store)
        self.blocks = [
            ParameterBlock(
                f"block {number}",
                [
                    StreamedShard(masters[shard.parameter], home, shard)
                    for shard in FsdpShard.of_group(group)
                    if shard.parameter in masters
                ],
                self.memory,
            )
            for number, group in enumerate(self.groups)
        ]
        deepest = _DEEPEST_HOST if home.store is None else _DEEPEST_DISK
        self.stream = BlockStream(self.blocks, home.device, deepest=deepest, cyclic=False, make_room=self._make_room)
        self._make_room(self.stream.depth)
        for number, group in enumerate(self.groups):
            around_unshard(group, partial(self._around, number, group))

    def _make_room(self, depth: int) -> bool:
        return self.memory.resize(window_bytes([block.nbytes for block in self.blocks], depth))

    @property
    def weights(self) -> dict[nn.Parameter, StreamedParameter]:
        """The streamed weights, by parameter."""
        return {weight.master.parameter: weight for block in self.blocks for weight in block.weights}

    @contextmanager
    def _around(self, number: int, group: Any, async_op: bool) -> Iterator[None]:
        """Hold the shard of a block on the device while its all-gather is issued."""
        way, copies = BACKWARD if is_before_backward(group) else FORWARD, self.memory.link.copies
        gather = None if copies is None else all_gather_stream(group, async_op)
        with torch.cuda.stream(copies):
            self.stream.need(number, way)
        if copies is not None and gather is not None:
            gather.wait_stream(copies)
        try:
            yield
        finally:
            if copies is not None and gather is not None:
                # The memory belongs to the copy stream, and may be written again once the all-gather has read it.
                copies.wait_stream(gather)
            with torch.cuda.stream(copies):
                self.stream.done(number, way)

    def evict_all(self) -> None:
        """Free the device memory of all shards: weights change."""
        self.stream.release_all()
        # Sources in host memory may be written next.
        self.memory.link.synchronize()

    def release(self) -> None:
        """Undo the streaming: parameters hold their shards again."""
        for group in self.groups:
            undo_around_unshard(group)
        self.evict_all()
        for weight in self.weights.values():
            weight.give_back()  # type: ignore[attr-defined]
        self.memory.link.close()


def _without_memory(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    made = torch.empty(shape, dtype=dtype, device=device)
    made.untyped_storage().resize_(0)
    return made
