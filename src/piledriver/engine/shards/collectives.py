"""Differentiable collectives, named as in Megatron-LM (Shoeybi et al., 2019).

The backward depends on what reads the result: if each rank computes a different part from it, gradients are partial and
must be reduced; if all ranks compute the same from it, each holds the full gradient already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


# Of the process, not of a context: the compiler guards a plain value and cannot trace a context variable.
_in_order = False


@contextmanager
def ordered_sums() -> Iterator[None]:
    """Within it, all-reduces add the tensors of ranks one after the other, in the order of ranks.

    Backends add different places of a tensor in different orders, so that a sum depends on where it stands.
    """
    global _in_order
    before, _in_order = _in_order, True
    try:
        yield
    finally:
        _in_order = before


@dataclass(frozen=True)
class Group:
    """A process group as plain values, which a compiler can trace and copies of a model can share."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Group:
        """Return the group of a one-axis mesh."""
        return cls(str(mesh.get_group().group_name), mesh.size(), mesh.get_local_rank())

    @classmethod
    def world(cls) -> Group:
        """Return the group of all ranks."""
        assert dist.group.WORLD is not None
        return cls(str(dist.group.WORLD.group_name), dist.get_world_size(), dist.get_rank())


def copy_to_region(x: Tensor, group: Group) -> Tensor:
    """Forward: identity. Backward: all-reduce."""
    return _exchange(x, "identity", "all-reduce", 0, group)


def reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """Forward: all-reduce. Backward: identity."""
    return _exchange(x, "all-reduce", "identity", 0, group)


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """Forward: all-reduce. Backward: all-reduce."""
    return _exchange(x, "all-reduce", "all-reduce", 0, group)


def gather_from_sequence_region(x: Tensor, dim: int, group: Group) -> Tensor:
    """Forward: all-gather along `dim`. Backward: reduce-scatter."""
    return _exchange(x, "all-gather", "reduce-scatter", dim, group)


def reduce_scatter_to_sequence_region(x: Tensor, dim: int, group: Group) -> Tensor:
    """Forward: reduce-scatter along `dim`. Backward: all-gather."""
    return _exchange(x, "reduce-scatter", "all-gather", dim, group)


def gather_from_region(x: Tensor, dim: int, group: Group) -> Tensor:
    """Forward: all-gather along `dim`. Backward: keep this rank's chunk."""
    return _exchange(x, "all-gather", "chunk", dim, group)


def scatter_to_region(x: Tensor, dim: int, group: Group) -> Tensor:
    """Forward: keep this rank's chunk along `dim`. Backward: all-gather."""
    return _exchange(x, "chunk", "all-gather", dim, group)


def pad_to_multiple(x: Tensor, dim: int, multiple: int) -> Tensor:
    """Pad a dimension with zeros at its end, to the next multiple."""
    missing = -x.shape[dim] % multiple
    if missing == 0:
        return x
    widths = [0] * (2 * x.dim())
    widths[2 * (x.dim() - 1 - dim % x.dim()) + 1] = missing
    return F.pad(x, widths)


def _exchange(x: Tensor, forward: str, backward: str, dim: int, group: Group) -> Tensor:
    if group.size == 1:
        return x
    # torch's collectives are wrong for a negative dimension where the first one has size 1.
    dim %= max(x.dim(), 1)
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
    if way == "identity":
        return x.view_as(x)
    if way == "chunk":
        return x.chunk(size, dim)[rank].contiguous()
    # gloo cannot reduce 16-bit floats: on CPUs they are sent as fp32.
    wire = x.float() if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) else x
    wire = wire.contiguous()
    if way == "all-reduce" and _in_order:
        total, *rest = cast(Tensor, _wait(_all_gather(wire.unsqueeze(0), 0, name))).unbind(0)
        for one in rest:
            total = total + one
        return total.to(x.dtype)
    if way == "all-reduce":
        out = _all_reduce(wire, "sum", name)
    elif way == "all-gather":
        out = _all_gather(wire, dim, name)
    else:
        out = _reduce_scatter(wire, "sum", dim, name)
    return cast(Tensor, _wait(out)).to(x.dtype)


def all_to_all_rows(x: Tensor, received: list[int] | None, sent: list[int] | None, group: Group) -> Tensor:
    """All-to-all of rows; `sent` and `received` are rows per rank, None if all are equal. Differentiable."""
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
    """All-reduce by `how` ("sum", "max") over the group `name`, outside of autograd."""
    return cast(Tensor, _wait(_all_reduce(x, how, name)))
