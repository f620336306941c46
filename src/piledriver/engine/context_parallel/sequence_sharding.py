"""The tokens of a sequence that each cp rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piledriver.engine.errors import EngineError
from piledriver.engine.shards.collectives import Group, gather_from_sequence_region, pad_to_multiple
from piledriver.kernels.cross_entropy import IGNORE_INDEX


class SequenceSharding:
    """This rank's part of a sequence: one chunk, or with `zigzag` one from the front and one from the back."""

    def __init__(self, group: Group, *, zigzag: bool, may_pad: bool = True) -> None:
        self.group, self.zigzag, self.may_pad = group, zigzag, may_pad
        self.length = 0
        """Tokens of the whole sequence being computed, before padding."""

    @property
    def pieces(self) -> int:
        """Number of chunks of equal size per sequence."""
        return self.group.size * (2 if self.zigzag else 1)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a full sequence."""
        if not self.may_pad and torch.is_grad_enabled() and x.shape[dim] % self.pieces:
            raise EngineError(
                f"{x.shape[dim]} tokens in {self.pieces} chunks need padding, which the balance loss would count",
                fix=f"use lengths that {self.pieces} divides",
            )
        chunks = pad_to_multiple(x, dim, self.pieces).chunk(self.pieces, dim)
        if not self.zigzag:
            return chunks[self.group.rank].contiguous()
        return torch.cat((chunks[self.group.rank], chunks[-1 - self.group.rank]), dim)

    def shard_targets(self, targets: Tensor) -> Tensor:
        """Return this rank's part of [batch, time] targets."""
        # Padding must not be counted: shift so that zeros mean "ignored", pad, shift back.
        return self.shard(targets - IGNORE_INDEX, 1) + IGNORE_INDEX

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """All-gather the full sequence; gradients of all ranks are summed."""
        x = gather_from_sequence_region(x, dim, self.group)
        if self.zigzag:
            chunks = x.chunk(self.pieces, dim)
            x = torch.cat((*chunks[::2], *reversed(chunks[1::2])), dim)
        return x.narrow(dim, 0, self.length)

    def __deepcopy__(self, memo: Any) -> SequenceSharding:
        return self
