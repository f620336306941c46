"""Ulysses (Jacobs et al., 2023): all-to-all so that each rank attends over the full sequence for some of the heads.

Any mask and kernel work as on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from piledriver.engine.context_parallel.sequence_sharding import SequenceSharding
from piledriver.engine.errors import EngineError
from piledriver.engine.shards.collectives import Group, all_to_all_rows, pad_to_multiple
from piledriver.engine.tensor_parallel.transformer import heads_of
from piledriver.kernels.attention import Mask


class UlyssesAttention:
    """An attention kernel between two all-to-alls: sequence to heads, and back."""

    def __init__(self, inner: Callable[..., Tensor], sharding: SequenceSharding) -> None:
        self.inner, self.sharding = inner, sharding

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        *,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if q.shape[2] != k.shape[2]:
            raise EngineError("a key-value cache is not sharded over cp", fix="generate with cp=1")
        group, time = self.sharding.group, q.shape[2]
        k, v = (with_enough_heads(x, q.shape[1], group.size) for x in (k, v))
        q, k, v = (to_heads(x, group).narrow(2, 0, self.sharding.length) for x in (q, k, v))
        first, heads = group.rank * q.shape[1], q.shape[1]
        mask, slopes = heads_of(mask, slopes, first, heads)
        if sinks is not None:
            options["sinks"] = sinks.narrow(0, first, heads)
        out = self.inner(q, k, v, mask, slopes=slopes, **options)
        return to_sequence(pad_to_multiple(out, 2, time * group.size), group)


def to_heads(x: Tensor, group: Group) -> Tensor:
    """[batch, heads, time / C, head_dim] to [batch, heads / C, time, head_dim]."""
    batch, heads, time, width = x.shape
    pieces = x.view(batch, group.size, heads // group.size, time, width).transpose(0, 1)
    came = all_to_all_rows(pieces, None, None, group)
    return came.permute(1, 2, 0, 3, 4).reshape(batch, heads // group.size, -1, width)


def to_sequence(x: Tensor, group: Group) -> Tensor:
    """Back: [batch, heads / C, time, head_dim] to [batch, heads, time / C, head_dim]."""
    batch, heads, time, width = x.shape
    pieces = x.view(batch, heads, group.size, time // group.size, width).permute(2, 0, 1, 3, 4)
    came = all_to_all_rows(pieces, None, None, group)
    return came.transpose(0, 1).reshape(batch, heads * group.size, -1, width)


def with_enough_heads(x: Tensor, heads: int, size: int) -> Tensor:
    """Repeat key-value heads until every rank gets one."""
    times = size // math.gcd(x.shape[1], size)
    if times > 1 and heads % (x.shape[1] * times):
        times = heads // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, dim=1)
