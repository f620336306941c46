"""Collectives over nested structures. In a world of one process they return their input.

In debug mode (`World.debug`) ranks first compare what they are about to call; see `agreement`.
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
    """Concatenate every rank's tensors along the first dimension in rank order, on every rank.

    >>> gather(World(), {"loss": torch.tensor([1.0])})
    {'loss': tensor([1.])}
    """
    if not world.is_distributed:
        return data
    check_agreement(world, "gather", data)
    with lost_peer_errors(world, "gather"):
        return map_tensors(lambda t: _gather_one(world, t), data, strict=True)


def _gather_one(world: World, tensor: torch.Tensor) -> torch.Tensor:
    local = _sendable(world, tensor)
    local = local.reshape(1) if local.ndim == 0 else local.contiguous()
    joined = local.new_empty(world.size * local.shape[0], *local.shape[1:])
    _all_gather(joined, local)
    return joined.to(tensor.device)


def reduce(world: World, data: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return the sum, mean, max or min over ranks, times `scale`, on every rank. The input is not changed."""
    if reduction not in (*_REDUCTIONS, "none"):
        raise WorldError(f"unknown reduction {reduction!r}", fix=f"choose from {', '.join(_REDUCTIONS)}, none")
    if not world.is_distributed:
        return data if scale == 1.0 else map_tensors(lambda t: t * scale, data)
    check_agreement(world, "reduce", data)
    with lost_peer_errors(world, "reduce"):
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
    """Return the tensors of rank `source` on every rank. The input is not changed."""
    if not world.is_distributed:
        return data
    check_agreement(world, "broadcast", data)
    with lost_peer_errors(world, "broadcast"):
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
    with lost_peer_errors(world, "pad_across_processes"):
        return map_tensors(lambda t: _pad_one(world, t, dim, pad_index, pad_first), data, strict=True)


def _pad_one(world: World, tensor: torch.Tensor, dim: int, pad_index: float, pad_first: bool) -> torch.Tensor:
    if not -tensor.ndim <= dim < tensor.ndim:
        return tensor
    lengths = torch.tensor([tensor.shape[dim]], device=_comm_device(world))
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
    """Split every tensor of rank `source` evenly along the first dimension and return each rank its part."""
    if not world.is_distributed:
        return data
    form = broadcast_object(world, _form(world, data) if world.rank == source else None, source)
    mine = iter([leaf for _, leaf in leaves(data)] if world.rank == source else [])
    return map_tensors(
        lambda slot: _scatter_one(world, slot, mine, source), form, test=lambda x: isinstance(x, _PartShape)
    )


class _PartShape:
    """Shape and dtype of a rank's part of a tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype


def _form(world: World, data: Any) -> Any:
    def slot(tensor: torch.Tensor) -> _PartShape:
        if tensor.ndim == 0 or tensor.shape[0] % world.size:
            raise WorldError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be split evenly over {world.size} ranks",
                fix="pad its first dimension to a multiple of the world size",
            )
        return _PartShape((tensor.shape[0] // world.size, *tensor.shape[1:]), tensor.dtype)

    return map_tensors(slot, data, strict=True)


def _scatter_one(world: World, slot: _PartShape, mine: Iterator[torch.Tensor], source: int) -> torch.Tensor:
    part = torch.empty(slot.shape, dtype=slot.dtype, device=_comm_device(world))
    parts = None
    if world.rank == source:
        parts = [piece.contiguous() for piece in _sendable(world, next(mine)).chunk(world.size)]
    with lost_peer_errors(world, "scatter"):
        dist.scatter(part, parts, src=source)
    return part.to(world.device)


def gather_object(world: World, thing: Any) -> list[Any]:
    """Return a list of one picklable object of every rank, in rank order, on every rank."""
    if not world.is_distributed:
        return [thing]
    gathered: list[Any] = [None] * world.size
    with lost_peer_errors(world, "gather_object"):
        dist.all_gather_object(gathered, thing)
    return gathered


def broadcast_object(world: World, thing: Any, source: int = 0) -> Any:
    """Return the picklable object of rank `source` on every rank."""
    if not world.is_distributed:
        return thing
    box = [thing]
    with lost_peer_errors(world, "broadcast_object"):
        dist.broadcast_object_list(box, src=source)
    return box[0]


def any_rank(world: World, mine: bool) -> bool:
    """Return whether `mine` is true on at least one rank."""
    if not world.is_distributed:
        return mine
    flag = torch.tensor([int(mine)], device=_comm_device(world))
    with lost_peer_errors(world, "any_rank"):
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


@contextmanager
def lost_peer_errors(world: World, operation: str) -> Iterator[None]:
    """Convert the backends' errors for a lost peer to `LostPeerError`, which names the rank and the operation."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise LostPeerError(
            f"rank {world.rank}: {operation} failed because another process is gone or cannot be reached: "
            f"{next(iter(str(error).splitlines()), '')}",
            fix="find the first rank that failed in the logs; raise the timeout if it was only slow",
        ) from error


_LOST_PEER_MESSAGES = (
    "connection closed by peer",
    "connection reset",
    "timed out waiting",
    "broken pipe",
    "connection refused",
)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error of torch means that a peer died or the network is down."""
    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _LOST_PEER_MESSAGES)


def _comm_device(world: World) -> torch.device:
    """Return the device whose tensors the process group can send."""
    return world.device if world.backend and world.backend != "gloo" else torch.device("cpu")


def _sendable(world: World, tensor: torch.Tensor) -> torch.Tensor:
    # A gloo-only group sends CPU tensors; a mixed one sends either. Gradients are not sent.
    if world.backend and "," in world.backend:
        return tensor.detach()
    return tensor.detach().to(_comm_device(world))
