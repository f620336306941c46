"""Parallelism by names: parameters and activations name their dimensions, one table says where each name is cut.

    sharding = Sharding(mesh, {"batch": "data", "mlp": "tensor", "heads": "tensor", "vocab": "tensor"})
    variables = sharding.init(model, key(0), tokens)          # DTensors, made shard by shard
    batch = sharding.batch(tokens)                            # a DTensor too
    model.apply(variables, batch, sharding=sharding)          # the same pure function; torch moves the data

Data parallel, tensor parallel or both are three tables for one train step, which holds no communication code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from piledriver.core.errors import nearest, suggest
from piledriver.functional.errors import PartitionError
from piledriver.functional.frame import Axes, Declaration, made
from piledriver.functional.metrics import merge_all
from piledriver.functional.module import Module, Spec
from piledriver.functional.random.keys import Key
from piledriver.functional.tree import Path, Tree, flatten, unflatten

Rules = Mapping[str, str | None]


class Sharding:
    """A mesh and a rules table from logical axis names to mesh axes; names without a rule are not cut."""

    def __init__(self, mesh: DeviceMesh, rules: Rules) -> None:
        names = mesh.mesh_dim_names or ()
        for axis, target in rules.items():
            if target is not None and not isinstance(target, str):
                raise PartitionError(
                    f"the rule for {axis!r} names {target!r}",
                    fix="one name is cut along one mesh axis: name that, or None",
                )
            if target is not None and target not in names:
                raise PartitionError(
                    f"the rule for {axis!r} names the mesh axis {target!r}",
                    fix=suggest(target, names) if names else "give the mesh axes names",
                )
        self.mesh = mesh
        self.rules = dict(rules)

    def placements(self, axes: Axes | None, shape: tuple[int, ...] | torch.Size) -> list[Placement]:
        """Where a tensor with these axis names lies: one placement for every mesh axis.

        Two dimensions with the same mesh axis: the first one is cut. A size that does not divide is an error.
        """
        found: list[Placement] = [Replicate()] * self.mesh.ndim
        if axes is None:
            return found
        if len(axes) != len(shape):
            raise PartitionError(f"axis names {axes} for the shape {tuple(shape)}", fix="name every dimension, or None")
        names = self.mesh.mesh_dim_names or ()
        for dim, axis in enumerate(axes):
            target = self.rules.get(axis) if axis is not None else None
            if target is None or isinstance(found[names.index(target)], Shard):
                continue
            index = names.index(target)
            if shape[dim] % self.mesh.size(index):
                raise PartitionError(
                    f"the axis {axis!r} of size {shape[dim]} does not divide by {self.mesh.size(index)} ({target!r})",
                    fix=f"change the size, the mesh, or the rule '{axis}': None",
                )
            found[index] = Shard(dim)
        return found

    def init(self, model: Module, key: Key, *args: Any, **kwargs: Any) -> Tree:
        """Variables as DTensors; every process makes one whole parameter at a time and keeps its part of it."""
        device = torch.device(self.mesh.device_type)
        declared = model.declarations(*args, **kwargs)
        self._check_names(one.axes for one in declared.values())
        return unflatten(
            {
                (collection, *path): self._placed((collection, *path), functools.partial(made, one, key, device), one)
                for (collection, path), one in declared.items()
            }
        )

    def shard(self, variables: Mapping[str, Any], spec: Mapping[str, Any]) -> Tree:
        """Variables that every process holds whole, as DTensors; `spec` is what `model.spec(...)` returned."""
        specs = flatten(spec)
        self._check_names(one.axes for one in specs.values())
        return unflatten(
            {
                path: self._placed(path, functools.partial(_itself, leaf), specs.get(path))
                for path, leaf in flatten(variables).items()
            }
        )

    def _placed(self, path: Path, make: Callable[[], Tensor], described: Spec | Declaration | None) -> Tensor:
        """One variable as a DTensor; what does not fit is refused by its path, before it is made."""
        axes = None if described is None else described.axes
        try:
            if described is not None:
                self.placements(axes, described.shape)
            return self.place(make(), axes)
        except PartitionError as error:
            raise PartitionError(f"{'.'.join(path)}: {error.what}", fix=error.fix) from error

    def _check_names(self, all_axes: Iterable[Axes | None]) -> None:
        """Refuse a rule that is one slip away from a parameter's axis name; others may be of activations alone."""
        names = {name for axes in all_axes for name in axes or () if name is not None}
        for rule in sorted(set(self.rules) - names - {"batch", "length"}):
            if nearest(rule, names):
                raise PartitionError(f"no parameter has an axis named {rule!r}", fix=suggest(rule, names))

    def place(self, value: Tensor, axes: Axes | None) -> Tensor:
        """One tensor that every process holds whole, as a DTensor. Nothing is sent."""
        value = value.to(self.mesh.device_type)
        return distribute_tensor(value, self.mesh, self.placements(axes, value.shape), src_data_rank=None)

    def batch(self, batch: Any, axis: str = "batch") -> Any:
        """The whole batch, alike on every process, cut along its first dimension; single numbers are not cut."""
        return pytree.tree_map_only(
            Tensor, lambda one: self.place(one, (axis, *[None] * (one.ndim - 1)) if one.ndim else None), batch
        )

    def local_batch(self, batch: Any, axis: str = "batch") -> Any:
        """Each process's own part of the batch, as one DTensor of all parts."""
        target = self.rules.get(axis)
        names = self.mesh.mesh_dim_names or ()
        placements = [Shard(0) if name == target else Replicate() for name in names]
        return pytree.tree_map_only(
            Tensor, lambda one: DTensor.from_local(one, self.mesh, placements, run_check=False), batch
        )

    def constrain(self, value: Tensor, axes: Axes) -> Tensor:
        """Lay an activation out by its names; a plain tensor stays as it is."""
        if not isinstance(value, DTensor):
            return value
        placements = self.placements(axes, value.shape)
        laid: Tensor = _GradientToo.apply(value.redistribute(self.mesh, placements), placements)  # type: ignore[no-untyped-call]
        return laid


def _itself(value: Tensor) -> Tensor:
    return value


class _GradientToo(torch.autograd.Function):
    """Lay the gradient out as the value is: else it arrives as a sum to be made, which not every operator takes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, placements: list[Placement]) -> Tensor:
        ctx.placements = placements
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        return gradient.redistribute(gradient.device_mesh, ctx.placements), None


def whole(tree: Any) -> Any:
    """Every DTensor of a tree gathered to a plain tensor."""
    return pytree.tree_map_only(DTensor, lambda one: one.full_tensor(), tree)


def merge_processes(metric: Any, group: dist.ProcessGroup | None = None) -> Any:
    """A metric merged over all processes; every process gets the same result."""
    if not dist.is_initialized():
        return metric
    leaves, structure = pytree.tree_flatten(whole(metric))
    gathered: list[list[Tensor]] = []
    for leaf in leaves:
        parts = [torch.empty_like(leaf) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, leaf.contiguous(), group=group)
        gathered.append(parts)
    return merge_all(pytree.tree_unflatten(list(parts), structure) for parts in zip(*gathered, strict=True))


def embed_locally(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of a sharded table: every process looks up the rows that it holds, and the sum makes the rest.

    Torch's own masked sum loses track of its mask when the batch is cut too, so the masking is done here.
    """
    assert isinstance(table, DTensor)
    mesh = table.device_mesh
    if any(held.is_partial() for held in table.placements):
        # What an optimizer made of sums not yet made: a part of a row is no row.
        table = table.redistribute(mesh, [Replicate() if one.is_partial() else one for one in table.placements])
    if not isinstance(tokens, DTensor):
        tokens = DTensor.from_local(tokens, mesh, [Replicate()] * mesh.ndim, run_check=False)
    numbers, outputs, gradients = [], [], []
    for held, asked in zip(table.placements, tokens.placements, strict=True):
        is_cut = isinstance(held, Shard)
        numbers.append(Replicate() if is_cut else asked)
        outputs.append((Partial() if held.is_shard(0) else Shard(tokens.ndim)) if is_cut else asked)
        gradients.append(held if is_cut or not isinstance(asked, Shard) else Partial())
    _, offset = compute_local_shape_and_global_offset(table.shape, mesh, table.placements)
    rows = table.to_local(grad_placements=gradients)
    local = tokens.redistribute(mesh, numbers).to_local() - offset[0]
    is_mine = (local >= 0) & (local < len(rows))
    found = F.embedding(torch.where(is_mine, local, 0), rows)
    return DTensor.from_local(found * is_mine[..., None], mesh, outputs, run_check=False)


def attend_locally(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Attention on DTensors that are cut by batch and heads only: every process attends within its own part.

    Queries, keys and values are (batch, length, heads, head_dim). Other cuts are undone first; heads are cut only if
    the key heads can be cut too.
    """
    assert isinstance(query, DTensor)
    mesh = query.device_mesh
    placements = [_local_cut(one, index, mesh, key) for index, one in enumerate(query.placements)]
    parts = [one.redistribute(mesh, placements).to_local() for one in (query, key, value)]  # type: ignore[attr-defined]
    out = attend(
        *parts,
        mask=_local_mask(mask, mesh, placements),
        bias=_local_mask(bias, mesh, placements),
    )
    return DTensor.from_local(out, mesh, placements, run_check=False)


def _local_cut(placement: Placement, index: int, mesh: DeviceMesh, key: Tensor) -> Placement:
    if isinstance(placement, Shard) and placement.dim == 0:
        return placement
    if isinstance(placement, Shard) and placement.dim == 2 and key.shape[2] % mesh.size(index) == 0:
        return placement
    return Replicate()


def _local_mask(mask: Tensor | None, mesh: DeviceMesh, placements: list[Placement]) -> Tensor | None:
    """The part of a (batch, heads, queries, keys) mask that belongs to this process."""
    if mask is None:
        return None
    whole_mask = mask.full_tensor() if isinstance(mask, DTensor) else mask
    cuts: list[Placement] = []
    for placement in placements:
        dim = {0: 0, 2: 1}.get(placement.dim) if isinstance(placement, Shard) else None
        at = None if dim is None else dim - 4 + whole_mask.ndim
        is_cut = at is not None and at >= 0 and whole_mask.shape[at] > 1
        cuts.append(Shard(at) if is_cut and at is not None else Replicate())
    return distribute_tensor(whole_mask, mesh, cuts, src_data_rank=None).to_local()
