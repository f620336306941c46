"""Collectives that gradients flow through: each names what happens forward and what happens backward.

Which backward is right depends on who reads the result. Where each process goes on with a part of the work of its own,
its gradient is a part of the whole and parts are summed; where all processes go on with the same work, every one holds
the whole gradient already, and summing would count it several times. So the pairs are spelled out, not derived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_all_reduce: Any = funcol.all_reduce
_all_to_all: Any = funcol.all_to_all_single
_wait: Any = funcol.wait_tensor
# Renamed in torch 2.13.
_all_gather: Any = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_reduce_scatter: Any = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


@dataclass(frozen=True)
class Group:
    """Some processes, as plain values: a compiler can trace them and a copy of a model can share them."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Group:
        """The processes of a mesh of one axis."""
        return cls(str(mesh.get_group().group_name), mesh.size(), mesh.get_local_rank())

    @classmethod
    def world(cls) -> Group:
        """Return the group of all ranks."""
        assert dist.group.WORLD is not None
        return cls(str(dist.group.WORLD.group_name), dist.get_world_size(), dist.get_rank())


def copy_to_region(x: Tensor, group: Group) -> Tensor:
    """The same everywhere; each process reads it for a part of the work: gradients are summed."""
    return _exchange(x, "same", "sum", 0, group)


def reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """The sum of the parts; all processes go on with it: the gradient is whole already."""
    return _exchange(x, "sum", "same", 0, group)


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """The sum of the parts; each process reads it for a part of the work: gradients are summed too."""
    return _exchange(x, "sum", "sum", 0, group)


def gather_from_sequence_region(x: Tensor, dim: int, group: Group) -> Tensor:
    """The pieces put together; each process reads them for a part of the work: gradients are summed, then cut."""
    return _exchange(x, "gather", "scatter", dim, group)


def reduce_scatter_to_sequence_region(x: Tensor, dim: int, group: Group) -> Tensor:
    """This process's piece of the sum of the parts."""
    return _exchange(x, "scatter", "gather", dim, group)


def gather_from_region(x: Tensor, dim: int, group: Group) -> Tensor:
    """The pieces put together; all processes go on with the same work: the gradient is only cut."""
    return _exchange(x, "gather", "cut", dim, group)


def scatter_to_region(x: Tensor, dim: int, group: Group) -> Tensor:
    """This process's piece of what all processes hold."""
    return _exchange(x, "cut", "gather", dim, group)


def pad_to_multiple(x: Tensor, dim: int, multiple: int) -> Tensor:
    """Zeros at the end of a dimension, up to the next multiple: pieces must have one size."""
    missing = -x.shape[dim] % multiple
    if missing == 0:
        return x
    widths = [0] * (2 * x.dim())
    widths[2 * (x.dim() - 1 - dim % x.dim()) + 1] = missing
    return F.pad(x, widths)


def _exchange(x: Tensor, forward: str, backward: str, dim: int, group: Group) -> Tensor:
    if group.size == 1:
        return x
    return cast(Tensor, _apply_exchange(x, forward, backward, dim, group.name, group.size, group.rank))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: str, backward: str, dim: int, name: str, size: int, rank: int) -> Tensor:
        ctx.backward_way, ctx.place = backward, (dim, name, size, rank)
        return _run(forward, x, dim, name, size, rank)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (_run(ctx.backward_way, gradient, *ctx.place), *(None,) * 6)


_apply_exchange: Any = _Exchange.apply


def _run(way: str, x: Tensor, dim: int, name: str, size: int, rank: int) -> Tensor:
    if way == "same":
        return x.view_as(x)
    if way == "cut":
        return x.chunk(size, dim)[rank].contiguous()
    # gloo adds no half precision; on a CPU the wire is fp32.
    wire = x.float() if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) else x
    wire = wire.contiguous()
    if way == "sum":
        out = _all_reduce(wire, "sum", name)
    elif way == "gather":
        out = _all_gather(wire, dim, name)
    else:
        out = _reduce_scatter(wire, "sum", dim, name)
    return cast(Tensor, _wait(out)).to(x.dtype)


def all_to_all_rows(x: Tensor, received: list[int] | None, sent: list[int] | None, group: Group) -> Tensor:
    """Rows to other processes and from them; `sent` and `received` are rows per process, None where all are equal."""
    if group.size == 1:
        return x
    return cast(Tensor, _apply_all_to_all(x.contiguous(), received, sent, group.name))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int] | None, sent: list[int] | None, name: str) -> Tensor:
        ctx.way = (sent, received, name)
        return _run_all_to_all(x, received, sent, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _run_all_to_all(gradient.contiguous(), *ctx.way), None, None, None


_apply_all_to_all: Any = _AllToAll.apply


def _run_all_to_all(x: Tensor, received: list[int] | None, sent: list[int] | None, name: str) -> Tensor:
    return cast(Tensor, _wait(_all_to_all(x, received, sent, name)))


def all_reduce_without_grad(x: Tensor, how: str, name: str) -> Tensor:
    """Sum or maximum over a group, outside of what gradients flow through."""
    return cast(Tensor, _wait(_all_reduce(x, how, name)))
