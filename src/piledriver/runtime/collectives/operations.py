"""Collectives over nested structures. Each takes the world, works on any nesting, and costs nothing in a world of one.

In debug mode (`World.debug`) every rank first tells the others what it is about to do; see `agreement`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from piledriver.runtime.collectives.agreement import check_agreement
from piledriver.runtime.collectives.nested import leaves, map_tensors
from piledriver.runtime.errors import LostPeerError, WorldError
from piledriver.runtime.world import World

# torch 2.13 renamed it and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def gather(world: World, data: Any) -> Any:
    """Every rank's tensors, joined along the first dimension in rank order, on every rank.

    >>> gather(World(), {"loss": torch.tensor([1.0])})
    {'loss': tensor([1.])}
    """
    if not world.is_distributed:
        return data
    check_agreement(world, "gather", data)
    with lost_peers_named(world, "gather"):
        return map_tensors(lambda t: _gather_one(world, t), data, strict=True)


def _gather_one(world: World, tensor: torch.Tensor) -> torch.Tensor:
    local = _sendable(world, tensor)
    local = local.reshape(1) if local.ndim == 0 else local.contiguous()
    joined = local.new_empty(world.size * local.shape[0], *local.shape[1:])
    _all_gather(joined, local)
    return joined.to(tensor.device)


def reduce(world: World, data: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """The sum, mean, maximum or minimum over ranks, times `scale`, on every rank; the input is not changed."""
    if reduction not in (*_REDUCTIONS, "none"):
        raise WorldError(f"unknown reduction {reduction!r}", fix=f"choose from {', '.join(_REDUCTIONS)}, none")
    if not world.is_distributed:
        return data if scale == 1.0 else map_tensors(lambda t: t * scale, data)
    check_agreement(world, "reduce", data)
    with lost_peers_named(world, "reduce"):
        return map_tensors(lambda t: _reduce_one(world, t, reduction, scale), data, strict=True)


def _reduce_one(world: World, tensor: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
    if reduction == "none":
        return tensor * scale if scale != 1.0 else tensor
    result = _sendable(world, tensor).clone()
    dist.all_reduce(result, _REDUCTIONS[reduction])
    if reduction == "mean":
        result = result / world.size if result.is_floating_point() or result.is_complex() else result.div(world.size)
    return (result * scale if scale != 1.0 else result).to(tensor.device)


def broadcast(world: World, data: Any, source: int = 0) -> Any:
    """The tensors of rank `source`, on every rank; the input is not changed."""
    if not world.is_distributed:
        return data
    check_agreement(world, "broadcast", data)
    with lost_peers_named(world, "broadcast"):
        return map_tensors(lambda t: _broadcast_one(world, t, source), data, strict=True)


def _broadcast_one(world: World, tensor: torch.Tensor, source: int) -> torch.Tensor:
    result = _sendable(world, tensor).contiguous().clone()
    dist.broadcast(result, src=source)
    return result.to(tensor.device)


def pad_across_processes(world: World, data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad every tensor along `dim` to the longest of all ranks, so that it can be gathered."""
    if not world.is_distributed:
        return data
    check_agreement(world, "pad_across_processes", data, free_dim=dim)
    with lost_peers_named(world, "pad_across_processes"):
        return map_tensors(lambda t: _pad_one(world, t, dim, pad_index, pad_first), data, strict=True)


def _pad_one(world: World, tensor: torch.Tensor, dim: int, pad_index: float, pad_first: bool) -> torch.Tensor:
    if not -tensor.ndim <= dim < tensor.ndim:
        return tensor
    lengths = torch.tensor([tensor.shape[dim]], device=_wire(world))
    dist.all_reduce(lengths, dist.ReduceOp.MAX)
    longest = int(lengths.item())
    if longest == tensor.shape[dim]:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = longest
    padded = tensor.new_full(shape, pad_index)
    start = longest - tensor.shape[dim] if pad_first else 0
    padded.narrow(dim, start, tensor.shape[dim]).copy_(tensor)
    return padded


def scatter(world: World, data: Any, source: int = 0) -> Any:
    """Rank `source` cuts every tensor along the first dimension into equal parts and gives each rank its own."""
    if not world.is_distributed:
        return data
    form = broadcast_object(world, _form(world, data) if world.rank == source else None, source)
    mine = iter([leaf for _, leaf in leaves(data)] if world.rank == source else [])
    return map_tensors(lambda slot: _scatter_one(world, slot, mine, source), form, test=lambda x: isinstance(x, _Slot))


class _Slot:
    """Where a tensor goes, and what it is like there."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype


def _form(world: World, data: Any) -> Any:
    def slot(tensor: torch.Tensor) -> _Slot:
        if tensor.ndim == 0 or tensor.shape[0] % world.size:
            raise WorldError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be cut into {world.size} equal parts",
                fix="pad its first dimension to a multiple of the number of processes",
            )
        return _Slot((tensor.shape[0] // world.size, *tensor.shape[1:]), tensor.dtype)

    return map_tensors(slot, data, strict=True)


def _scatter_one(world: World, slot: _Slot, mine: Iterator[torch.Tensor], source: int) -> torch.Tensor:
    part = torch.empty(slot.shape, dtype=slot.dtype, device=_wire(world))
    parts = None
    if world.rank == source:
        parts = [piece.contiguous() for piece in _sendable(world, next(mine)).chunk(world.size)]
    with lost_peers_named(world, "scatter"):
        dist.scatter(part, parts, src=source)
    return part.to(world.device)


def gather_object(world: World, thing: Any) -> list[Any]:
    """One picklable thing from every rank, in rank order, on every rank."""
    if not world.is_distributed:
        return [thing]
    everyone: list[Any] = [None] * world.size
    with lost_peers_named(world, "gather_object"):
        dist.all_gather_object(everyone, thing)
    return everyone


def broadcast_object(world: World, thing: Any, source: int = 0) -> Any:
    """The picklable thing of rank `source`, on every rank."""
    if not world.is_distributed:
        return thing
    box = [thing]
    with lost_peers_named(world, "broadcast_object"):
        dist.broadcast_object_list(box, src=source)
    return box[0]


def any_rank(world: World, mine: bool) -> bool:
    """Whether the answer is yes on at least one rank."""
    if not world.is_distributed:
        return mine
    flag = torch.tensor([int(mine)], device=_wire(world))
    with lost_peers_named(world, "any_rank"):
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def sum_over_ranks(world: World, number: float) -> float:
    """The sum of one number of every rank, in double precision where the device has it."""
    if not world.is_distributed:
        return number
    total = torch.tensor([number], dtype=torch.float64, device=_wire(world))
    with lost_peers_named(world, "sum_over_ranks"):
        dist.all_reduce(total)
    return float(total.item())


@contextmanager
def lost_peers_named(world: World, operation: str) -> Iterator[None]:
    """Turn the backend's many ways to say "a peer is gone" into one error that says what was being done, and where."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise LostPeerError(
            f"rank {world.rank}: {operation} failed because another process is gone or cannot be reached: "
            f"{next(iter(str(error).splitlines()), '')}",
            fix="look for the first rank that failed in the logs; raise the timeout if it was only slow",
        ) from error


_SIGNS = ("connection closed by peer", "connection reset", "timed out waiting", "broken pipe", "connection refused")


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of torch's means that a peer died or the network is cut."""
    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def _wire(world: World) -> torch.device:
    """The device whose tensors the group can send."""
    return world.device if world.backend and world.backend != "gloo" else torch.device("cpu")


def _sendable(world: World, tensor: torch.Tensor) -> torch.Tensor:
    # A gloo-only group sends CPU tensors; a mixed one sends both as they are. Gradients do not travel.
    if world.backend and "," in world.backend:
        return tensor.detach()
    return tensor.detach().to(_wire(world))
