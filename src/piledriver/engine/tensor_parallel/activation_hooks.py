"""Hooks that carry activations in and out of split layers, whole or split along the sequence between them.

Between split layers the residual stream is whole on every process, or each process holds its part of the sequence
(sequence parallel: Korthikanti et al., 2022). Lengths that do not divide are padded with zeros at the end of the
stream, which no token sees, and cut again where it is put together.
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
    """The residual stream of one model on one process: who shares it, and how."""

    def __init__(self, group: Group, *, by_sequence: bool) -> None:
        self.group, self.by_sequence = group, by_sequence
        self.length = 0
        """Tokens of the sequence being computed, before padding; set where the stream begins."""

    def gather_input(self, x: Tensor) -> Tensor:
        """What enters a layer of which this process computes a part: the whole stream."""
        if not self.by_sequence:
            return copy_to_region(x, self.group)
        return gather_from_sequence_region(x, 1, self.group).narrow(1, 0, self.length)

    def reduce_output(self, x: Tensor) -> Tensor:
        """What leaves such layers: the sum of the parts."""
        if not self.by_sequence:
            return reduce_from_region(x, self.group)
        return reduce_scatter_to_sequence_region(pad_to_multiple(x, 1, self.group.size), 1, self.group)

    def scatter(self, x: Tensor) -> Tensor:
        """This process's share of something that all hold; the dimension before the last is the sequence."""
        if not self.by_sequence:
            return x
        return scatter_to_region(pad_to_multiple(x, -2, self.group.size), -2, self.group)

    def gather(self, x: Tensor) -> Tensor:
        """The stream put together, for work that all processes do alike."""
        if not self.by_sequence:
            return x
        return gather_from_region(x, 1, self.group).narrow(1, 0, self.length)

    def begin(self, x: Tensor, dim: int = 1) -> None:
        """Note the length of the sequence."""
        self.length = x.shape[dim]

    def __deepcopy__(self, memo: Any) -> SequenceParallelHooks:
        return self


def hook_input(module: nn.Module, stream: SequenceParallelHooks) -> None:
    """The first argument of a layer that computes a part of the columns."""
    module.register_forward_pre_hook(lambda _, args: (stream.gather_input(args[0]), *args[1:]))


def hook_output(module: nn.Module, stream: SequenceParallelHooks) -> None:
    """The output of a layer that sums over a part of the rows."""
    module.register_forward_hook(lambda _, args, out: stream.reduce_output(out))


class VocabParallelEmbedding:
    """An embedding of which this process holds the rows from `first` on: others give zeros, and all are summed."""

    def __init__(self, first: int, rows: int, stream: SequenceParallelHooks) -> None:
        self.first, self.rows, self.stream = first, rows, stream
        self.missing: Tensor | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Token numbers to rows of this part."""
        tokens = args[0]
        self.stream.begin(tokens)
        self.missing = (tokens < self.first) | (tokens >= self.first + self.rows)
        return (torch.where(self.missing, 0, tokens - self.first), *args[1:])

    def after(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """Zeros where another process holds the row, then the sum."""
        assert self.missing is not None
        out, self.missing = out.masked_fill(self.missing.unsqueeze(-1), 0.0), None
        return self.stream.reduce_output(out)

    def attach(self, embedding: nn.Module) -> None:
        """Hook onto an embedding whose weight is placed already."""
        embedding.register_forward_pre_hook(self.before)
        embedding.register_forward_hook(self.after)


class ShardedRMSNorm(nn.Module):
    """RMSNorm over a dimension of which this process holds a part: squares are summed over all."""

    weight: nn.Parameter | None

    def __init__(self, weight: nn.Parameter | None, dim: int, eps: float, group: Group) -> None:
        super().__init__()
        self.dim, self.eps, self.group = dim, eps, group
        self.register_parameter("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension as if it were whole."""
        wide = x.float()
        squares = all_reduce_sum(wide.square().sum(dim=-1, keepdim=True), self.group)
        normed = wide * torch.rsqrt(squares / self.dim + self.eps)
        return (normed if self.weight is None else normed * self.weight.float()).to(x.dtype)
