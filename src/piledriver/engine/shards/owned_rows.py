"""Optimizer shards (zero 1 and 2): the rows of a parameter that this rank steps on, as a `DTensor`.

The parameter stays replicated. Its shard is a `DTensor` over the same memory, which the optimizer holds in its place:
it keeps 1 / N of the states, and checkpoints name and reshard them as for zero 3. Rows are divided as by `Shard(0)`: in
even chunks, the last ones shorter or empty.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from piledriver.engine.mesh import Mesh
from piledriver.engine.torch_private import unmoved_dtensor
from piledriver.optim.shards import local

BUCKET_BYTES = 25 * 2**20

# torch 2.13 renamed them and warns about the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def is_expert(parameter: Tensor) -> bool:
    """Whether a parameter is sharded over the ep axis."""
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def is_optimizer_shard(parameter: Tensor) -> bool:
    """Whether this is an optimizer shard, not the parameter itself."""
    return getattr(parameter, "is_optimizer_shard", False)


def shard_axis(parameter: Tensor, mesh: Mesh) -> DeviceMesh | None:
    """Return the axis that shards a parameter's optimizer states, None if they are not sharded."""
    if mesh.alone or parameter.dim() == 0 or is_expert(parameter):
        return None
    axis = mesh.shard_group
    return axis if axis.size() > 1 else None


def optimizer_shard(parameter: nn.Parameter, mesh: Mesh) -> DTensor:
    """Return this rank's rows of a parameter, sharing its memory; kept as `parameter.optimizer_shard`."""
    known: DTensor | None = getattr(parameter, "optimizer_shard", None)
    if known is not None:
        return known
    whole = local(parameter).detach()
    placements: list[Placement] = [Replicate()] * mesh.shard.ndim
    axis = shard_axis(parameter, mesh)
    rows = whole
    if axis is not None:
        placements[-1] = _rows_placement(parameter)
        rows = _chunk(whole, axis)
    if mesh.tp.size() > 1:
        placements.append(parameter.placements[0] if isinstance(parameter, DTensor) else Replicate())
    # A parameter that is streamed is not on the device of the mesh.
    part: DTensor = unmoved_dtensor(rows, mesh.state_mesh, placements, parameter.shape)
    part.requires_grad_(parameter.requires_grad)
    part.is_optimizer_shard = True  # type: ignore[attr-defined]
    parameter.optimizer_shard = part  # type: ignore[attr-defined]
    return part


def _rows_placement(parameter: Tensor) -> Placement:
    """Return the placement of the rows; strided where tensor parallelism shards the rows too."""
    if isinstance(parameter, DTensor):
        placement = parameter.placements[0]
        if isinstance(placement, Shard) and placement.dim == 0:
            return _StridedShard(0, split_factor=parameter.device_mesh.size())
    return Shard(0)


def wrapped_like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return a local tensor as a `DTensor` with the placements of a parameter."""
    if not isinstance(parameter, DTensor):
        return part
    wrapped: Tensor = DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return wrapped


def expose_shard_gradient(parameter: nn.Parameter) -> None:
    """Zero 1: make the shard's gradient a view of the parameter's gradient."""
    part: DTensor | None = getattr(parameter, "optimizer_shard", None)
    if part is None:
        return
    master = getattr(parameter, "on_host", None)
    if parameter.grad is None:
        part.grad = None if master is None else part.grad
        return
    if master is not None:
        whole = local(parameter.grad).reshape(-1)
        master.add_gradient(whole[master.first : master.first + master.part.numel()].view(master.part.shape))
        parameter.grad = None
        return
    rows = local(part)
    begin = rows.storage_offset() - local(parameter).storage_offset()
    whole = local(parameter.grad).reshape(-1)
    part.grad = _as(part, whole[begin : begin + rows.numel()].view(rows.shape))


def accumulate_shard_gradient(parameter: nn.Parameter, padded: Tensor) -> None:
    """Zero 2: add received gradient rows to the shard's gradient, without their padding."""
    part: DTensor = parameter.optimizer_shard  # type: ignore[attr-defined]
    rows = local(part)
    came = padded[: rows.numel()].view(rows.shape)
    if (master := getattr(parameter, "on_host", None)) is not None:
        master.add_gradient(came)
        return
    if part.grad is None:
        part.grad = _as(part, came)
    else:
        local(part.grad).add_(came)


def clear_shard_gradient(parameter: nn.Parameter) -> None:
    """Set the shard's gradient to None."""
    part: DTensor | None = getattr(parameter, "optimizer_shard", None)
    if part is not None:
        part.grad = None


def _as(part: DTensor, rows: Tensor) -> DTensor:
    made: DTensor = DTensor.from_local(
        rows, part.device_mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride()
    )
    return made


def chunk_elements(parameter: Tensor, size: int) -> int:
    """Return the elements of one rank's chunk, padding included."""
    whole = local(parameter)
    return -(-whole.shape[0] // size) * (whole.numel() // max(whole.shape[0], 1))


def rows_in_chunks(tensor: Tensor, size: int, *, zero: bool = False) -> Tensor:
    """Return [size, chunk]: the rows as `Shard(0)` divides them, zero-padded; all zeros if `zero`."""
    chunk = chunk_elements(tensor, size)
    if zero:
        return tensor.new_zeros(size, chunk)
    flat = tensor.flatten()
    return nn.functional.pad(flat, (0, size * chunk - flat.numel())).view(size, chunk)


def reduce_scatter(out: Tensor, buffer: Tensor, *, group: Any) -> Any:
    """Start a reduce-scatter of a buffer over a group; return its work handle."""
    return _reduce_scatter(out, buffer, group=group, async_op=True)


@torch.no_grad()
def gather_rows(parameters: list[nn.Parameter], axis: DeviceMesh) -> None:
    """All-gather updated rows into the parameters, which share one dtype and device."""
    size = axis.size()
    rows_of = []
    for parameter in parameters:
        master = getattr(parameter, "on_host", None)
        rows = (local(parameter.optimizer_shard) if master is None else master.device_part).flatten()  # type: ignore[attr-defined]
        rows_of.append(nn.functional.pad(rows, (0, chunk_elements(parameter, size) - rows.numel())))
    sent = torch.cat(rows_of)
    del rows_of
    came = sent.new_empty(size * sent.numel())
    _all_gather(came, sent, group=axis.get_group())
    begin, table = 0, came.view(size, -1)
    for parameter in parameters:
        length = chunk_elements(parameter, size)
        whole = local(parameter).detach()
        whole.view(-1).copy_(table[:, begin : begin + length].flatten()[: whole.numel()])
        begin += length


def _chunk(whole: Tensor, axis: DeviceMesh) -> Tensor:
    rows = -(-whole.shape[0] // axis.size())
    begin = min(axis.get_local_rank() * rows, whole.shape[0])
    return whole[begin : min(begin + rows, whole.shape[0])]


def optimizer_tensors(parameters: Any) -> list[Tensor]:
    """Return the tensors that an optimizer steps on: the shard of each parameter that has one."""
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return [getattr(one, "optimizer_shard", one) if not is_optimizer_shard(one) else one for one in held]
