"""Hooks that gather and reduce activations around tensor-parallel layers.

Between them the residual stream is replicated, or sharded along the sequence (sequence parallelism: Korthikanti et al.,
2022). Sequences that tp does not divide are zero-padded at the end, which is removed after gathering.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.shards.collectives import (
    Group,
    all_reduce_sum,
    copy_to_region,
    gather_from_region,
    gather_from_sequence_region,
    pad_to_multiple,
    reduce_from_region,
    reduce_scatter_to_sequence_region,
    scatter_to_region,
)


class SequenceParallelHooks:
    """The residual stream of one model: its tp group, and whether it is sharded along the sequence."""

    def __init__(self, group: Group, *, by_sequence: bool) -> None:
        self.group, self.by_sequence = group, by_sequence
        self.length = 0
        """Tokens of the current sequence, before padding; set by `begin`."""

    def gather_input(self, x: Tensor) -> Tensor:
        """Return the full input of a column-parallel layer."""
        if not self.by_sequence:
            return copy_to_region(x, self.group)
        return gather_from_sequence_region(x, 1, self.group).narrow(1, 0, self.length)

    def reduce_output(self, x: Tensor) -> Tensor:
        """Reduce the partial outputs of a row-parallel layer."""
        if not self.by_sequence:
            return reduce_from_region(x, self.group)
        return reduce_scatter_to_sequence_region(pad_to_multiple(x, 1, self.group.size), 1, self.group)

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's shard of a replicated tensor along the sequence, its second last dimension."""
        if not self.by_sequence:
            return x
        return scatter_to_region(pad_to_multiple(x, -2, self.group.size), -2, self.group)

    def gather(self, x: Tensor) -> Tensor:
        """Return the full stream, for work that all ranks do alike."""
        if not self.by_sequence:
            return x
        return gather_from_region(x, 1, self.group).narrow(1, 0, self.length)

    def begin(self, x: Tensor, dim: int = 1) -> None:
        """Record the sequence length."""
        self.length = x.shape[dim]

    def __deepcopy__(self, memo: Any) -> SequenceParallelHooks:
        return self


def hook_input(module: nn.Module, stream: SequenceParallelHooks) -> None:
    """Hook the input of a column-parallel layer."""
    module.register_forward_pre_hook(lambda _, args: (stream.gather_input(args[0]), *args[1:]))


def hook_output(module: nn.Module, stream: SequenceParallelHooks) -> None:
    """Hook the output of a row-parallel layer."""
    module.register_forward_hook(lambda _, args, out: stream.reduce_output(out))


class VocabParallelEmbedding:
    """Hooks of an embedding whose rows from `first` on are here: other tokens give zeros, then outputs are reduced."""

    def __init__(self, first: int, rows: int, stream: SequenceParallelHooks) -> None:
        self.first, self.rows, self.stream = first, rows, stream
        self.missing: Tensor | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Map token ids to local rows."""
        tokens = args[0]
        self.stream.begin(tokens)
        self.missing = (tokens < self.first) | (tokens >= self.first + self.rows)
        return (torch.where(self.missing, 0, tokens - self.first), *args[1:])

    def after(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """Zero the tokens of other ranks, then reduce."""
        assert self.missing is not None
        out, self.missing = out.masked_fill(self.missing.unsqueeze(-1), 0.0), None
        return self.stream.reduce_output(out)

    def attach(self, embedding: nn.Module) -> None:
        """Register the hooks on an embedding whose weight is sharded already."""
        embedding.register_forward_pre_hook(self.before)
        embedding.register_forward_hook(self.after)


class ShardedRMSNorm(nn.Module):
    """RMSNorm over a sharded dimension: squares are all-reduced."""

    weight: nn.Parameter | None

    def __init__(self, weight: nn.Parameter | None, dim: int, eps: float, group: Group) -> None:
        super().__init__()
        self.dim, self.eps, self.group = dim, eps, group
        self.register_parameter("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the full last dimension."""
        wide = x.float()
        squares = all_reduce_sum(wide.square().sum(dim=-1, keepdim=True), self.group)
        normed = wide * torch.rsqrt(squares / self.dim + self.eps)
        return (normed if self.weight is None else normed * self.weight.float()).to(x.dtype)
