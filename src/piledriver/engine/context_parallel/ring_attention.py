"""Ring attention (Liu et al., 2023): keys and values move around the ring while each rank attends to what it holds.

Rank r of C holds chunks r and 2C - 1 - r of 2C, which balances the causal mask: own chunks are causal; of an earlier
rank all queries attend to the first chunk; of a later rank the second half of the queries attends to both. The next
keys are sent while a step computes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from piledriver.engine.shards.collectives import Group
from piledriver.kernels.attention.blockwise import attend_block, attend_block_backward, merge_blocks

_group_called: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, group: Group) -> Tensor:
    """Return causal attention of the local queries over the keys of all ranks, [batch, heads, time, head_dim]."""
    out: Tensor
    out, _ = _ring(q.contiguous(), k.contiguous(), v.contiguous(), scale, group.name, group.rank, group.size)
    return out


@torch.library.custom_op("piledriver::ring_attention", mutates_args=())
def _ring(q: Tensor, k: Tensor, v: Tensor, scale: float, name: str, rank: int, size: int) -> tuple[Tensor, Tensor]:
    half = q.shape[2] // 2
    pair = torch.stack((k, v))
    out, lse = torch.zeros_like(q, dtype=torch.float32), q.new_empty(0)
    for step in range(size):
        coming, work = _rotate(pair, name, rank, size) if step + 1 < size else (pair, [])
        owner = (rank - step) % size
        if owner == rank:
            first, lse = attend_block(q, k, v, True, scale)
            out = first.float()
        elif owner < rank:
            keys, values = pair[:, :, :, :half]
            out, lse = merge_blocks(out, lse, *attend_block(q, keys, values, False, scale))
        else:
            late, late_lse = attend_block(q[:, :, half:].contiguous(), pair[0], pair[1], False, scale)
            late, late_lse = merge_blocks(out[:, :, half:], lse[:, :, half:], late, late_lse)
            out, lse = torch.cat((out[:, :, :half], late), 2), torch.cat((lse[:, :, :half], late_lse), 2)
        _finish(work)
        pair = coming
    return out.to(q.dtype), lse.clone()


@torch.library.custom_op("piledriver::ring_attention_backward", mutates_args=())
def _ring_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    name: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    half = q.shape[2] // 2
    gradient = gradient.contiguous()
    pair = torch.stack((k, v))
    d_q = torch.zeros_like(q, dtype=torch.float32)
    # The gradients of keys and values follow them around the ring, one step further, back to their owner.
    d_pair = torch.zeros_like(pair, dtype=torch.float32)
    d_work: list[Any] = []
    for step in range(size):
        coming, work = _rotate(pair, name, rank, size) if step + 1 < size else (pair, [])
        owner = (rank - step) % size
        queries, keys = slice(0 if owner <= rank else half, None), slice(None, None if owner >= rank else half)
        more_q, more_k, more_v = attend_block_backward(
            gradient[:, :, queries].contiguous(),
            q[:, :, queries].contiguous(),
            pair[0][:, :, keys].contiguous(),
            pair[1][:, :, keys].contiguous(),
            out[:, :, queries].contiguous(),
            lse[:, :, queries].contiguous(),
            owner == rank,
            scale,
        )
        _finish(d_work)
        d_q[:, :, queries] += more_q
        d_pair[0, :, :, keys] += more_k
        d_pair[1, :, :, keys] += more_v
        _finish(work)
        d_pair, d_work = _rotate(d_pair, name, rank, size)
        pair = coming
    _finish(d_work)
    return d_q.to(q.dtype), d_pair[0].to(k.dtype, copy=True), d_pair[1].to(v.dtype, copy=True)


@_ring.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, name: str, rank: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@_ring_backward.register_fake
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    name: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.place = inputs[3:]


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    d_q, d_k, d_v = _ring_backward(gradient, *ctx.saved_tensors, *ctx.place)
    return d_q, d_k, d_v, None, None, None, None


_ring.register_autograd(_gradients, setup_context=_keep)


def _rotate(x: Tensor, name: str, rank: int, size: int) -> tuple[Tensor, list[Any]]:
    """Start sending to the next rank and receiving from the previous one."""
    group = _group_called(name)
    x, coming = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    following, before = (dist.get_global_rank(group, (rank + way) % size) for way in (1, -1))
    send = dist.P2POp(dist.isend, x, following, group)
    receive = dist.P2POp(dist.irecv, coming, before, group)
    # Gloo runs operations in order: even ranks send first.
    return coming, dist.batch_isend_irecv([send, receive] if rank % 2 == 0 else [receive, send])


def _finish(work: list[Any]) -> None:
    for one in work:
        one.wait()
