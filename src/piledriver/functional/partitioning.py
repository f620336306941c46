"""Parallelism by names: parameters and activations name their dimensions, one rules table shards each name.

    sharding = Sharding(mesh, {"batch": "data", "mlp": "tensor", "heads": "tensor", "vocab": "tensor"})
    variables = sharding.init(model, key(0), tokens)          # DTensors
    batch = sharding.batch(tokens)                            # a DTensor too
    model.apply(variables, batch, sharding=sharding)          # the same pure function; torch communicates

Data parallel, tensor parallel or both are three tables for one train step, which holds no communication code. The mesh
comes from outside: a `DeviceMesh`, or the mesh of a `Layout` (`piledriver.engine.mesh.make_mesh`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from piledriver.core.errors import nearest, suggest
from piledriver.functional.errors import PartitionError
from piledriver.functional.frame import Axes, Declaration, made
from piledriver.functional.metrics import merge_all
from piledriver.functional.module import Module, Spec
from piledriver.functional.random.keys import Key
from piledriver.functional.torch_private import shard_row_offset
from piledriver.functional.tree import Path, Tree, flatten, unflatten
from piledriver.runtime.collectives.operations import gather
from piledriver.runtime.world import current_world

Rules = Mapping[str, str | None]


class HasDeviceMesh(Protocol):
    """Anything that holds a `DeviceMesh`, such as the mesh of a layout."""

    @property
    def device_mesh(self) -> DeviceMesh: ...


def as_device_mesh(mesh: DeviceMesh | HasDeviceMesh) -> DeviceMesh:
    """Return the `DeviceMesh` itself, or the one that an object holds as `device_mesh`."""
    found = mesh if isinstance(mesh, DeviceMesh) else getattr(mesh, "device_mesh", None)
    if not isinstance(found, DeviceMesh):
        raise PartitionError(
            f"a {type(mesh).__name__} is not a device mesh",
            fix="pass a DeviceMesh, or the mesh of a layout on several ranks; one rank needs no sharding",
        )
    return found


class Sharding:
    """A mesh and a rules table from logical axis names to mesh axes; names without a rule are replicated."""

    def __init__(self, mesh: DeviceMesh | HasDeviceMesh, rules: Rules) -> None:
        mesh = as_device_mesh(mesh)
        names = mesh.mesh_dim_names or ()
        for axis, target in rules.items():
            if target is not None and not isinstance(target, str):
                raise PartitionError(
                    f"the rule for {axis!r} names {target!r}",
                    fix="a name is sharded along one mesh axis: name that, or None",
                )
            if target is not None and target not in names:
                raise PartitionError(
                    f"the rule for {axis!r} names the mesh axis {target!r}",
                    fix=suggest(target, names) if names else "give the mesh axes names",
                )
        self.mesh = mesh
        self.rules = dict(rules)

    def placements(self, axes: Axes | None, shape: tuple[int, ...] | torch.Size) -> list[Placement]:
        """Return the placements of a tensor with these axis names, one for every mesh axis.

        Of two dimensions with the same mesh axis the first is sharded. A size that does not divide is an error.
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
        """Return variables as DTensors; each rank makes one full parameter at a time and keeps its shard."""
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
        """Shard variables that every rank holds in full; `spec` is what `model.spec(...)` returned."""
        specs = flatten(spec)
        self._check_names(one.axes for one in specs.values())
        return unflatten({path: self._placed(path, leaf, specs.get(path)) for path, leaf in flatten(variables).items()})

    def _placed(self, path: Path, value: Tensor | Callable[[], Tensor], described: Spec | Declaration | None) -> Tensor:
        """Return one variable as a DTensor; one that does not fit is an error with its path, before it is made."""
        axes = None if described is None else described.axes
        try:
            if described is not None:
                self.placements(axes, described.shape)
            return self.place(value if isinstance(value, Tensor) else value(), axes)
        except PartitionError as error:
            raise PartitionError(f"{'.'.join(path)}: {error.what}", fix=error.fix) from error

    def _check_names(self, all_axes: Iterable[Axes | None]) -> None:
        """Reject a rule whose name is close to a parameter's axis name; others may name axes of activations."""
        names = {name for axes in all_axes for name in axes or () if name is not None}
        for rule in sorted(set(self.rules) - names - {"batch", "length"}):
            if nearest(rule, names):
                raise PartitionError(f"no parameter has an axis named {rule!r}", fix=suggest(rule, names))

    def place(self, value: Tensor, axes: Axes | None) -> Tensor:
        """Return a tensor that every rank holds in full as a DTensor, without communication."""
        value = value.to(self.mesh.device_type)
        return distribute_tensor(value, self.mesh, self.placements(axes, value.shape), src_data_rank=None)

    def batch(self, batch: Any, axis: str = "batch") -> Any:
        """Shard a batch that every rank holds in full along its first dimension; scalars are replicated."""
        return pytree.tree_map_only(
            Tensor, lambda one: self.place(one, (axis, *[None] * (one.ndim - 1)) if one.ndim else None), batch
        )

    def local_batch(self, batch: Any, axis: str = "batch") -> Any:
        """Return one DTensor of the global batch from each rank's own part of it."""
        target = self.rules.get(axis)
        names = self.mesh.mesh_dim_names or ()
        placements = [Shard(0) if name == target else Replicate() for name in names]
        return pytree.tree_map_only(
            Tensor, lambda one: DTensor.from_local(one, self.mesh, placements, run_check=False), batch
        )

    def constrain(self, value: Tensor, axes: Axes) -> Tensor:
        """Redistribute an activation by its axis names; return a plain tensor unchanged."""
        if not isinstance(value, DTensor):
            return value
        placements = self.placements(axes, value.shape)
        placed: Tensor = _RedistributeGradient.apply(value.redistribute(self.mesh, placements), placements)  # type: ignore[no-untyped-call]
        return placed


class _RedistributeGradient(torch.autograd.Function):
    """Redistribute the gradient to the placements of the value: some operators do not accept `Partial` gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, placements: list[Placement]) -> Tensor:
        ctx.placements = placements
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:
        return gradient.redistribute(gradient.device_mesh, ctx.placements), None


def whole(tree: Any) -> Any:
    """Return a tree with every DTensor gathered to a plain tensor."""
    return pytree.tree_map_only(DTensor, lambda one: one.full_tensor(), tree)


def merge_processes(metric: Any, mesh: DeviceMesh | HasDeviceMesh | None = None) -> Any:
    """Return a metric merged over the ranks of a mesh (all ranks if there is none); every rank gets the same result."""
    leaves, structure = pytree.tree_flatten(whole(metric))
    if mesh is None:
        gathered = gather(current_world(), [leaf[None] for leaf in leaves])
    else:
        ranks = as_device_mesh(mesh)
        one_each = [Shard(0)] * ranks.ndim
        gathered = [DTensor.from_local(leaf[None], ranks, one_each, run_check=False).full_tensor() for leaf in leaves]
    return merge_all(pytree.tree_unflatten(list(parts), structure) for parts in zip(*gathered, strict=True))


def embed_locally(tokens: Tensor, table: Tensor) -> Tensor:
    """Look up rows of a sharded table: each rank finds the rows that it holds, and a reduction adds the others.

    torch's own masked reduction loses its mask when the batch is sharded too, so the masking is done here.
    """
    assert isinstance(table, DTensor)
    mesh = table.device_mesh
    if any(held.is_partial() for held in table.placements):
        # The table may hold `Partial` placements after an optimizer step; reduce them before indexing rows.
        table = table.redistribute(mesh, [Replicate() if one.is_partial() else one for one in table.placements])
    if not isinstance(tokens, DTensor):
        tokens = DTensor.from_local(tokens, mesh, [Replicate()] * mesh.ndim, run_check=False)
    numbers, outputs, gradients = [], [], []
    for held, asked in zip(table.placements, tokens.placements, strict=True):
        is_cut = isinstance(held, Shard)
        numbers.append(Replicate() if is_cut else asked)
        outputs.append((Partial() if held.is_shard(0) else Shard(tokens.ndim)) if is_cut else asked)
        gradients.append(held if is_cut or not isinstance(asked, Shard) else Partial())
    rows = table.to_local(grad_placements=gradients)
    local = tokens.redistribute(mesh, numbers).to_local() - shard_row_offset(table)
    is_mine = (local >= 0) & (local < len(rows))
    found = F.embedding(torch.where(is_mine, local, 0), rows)
    return DTensor.from_local(found * is_mine[..., None], mesh, outputs, run_check=False)


def attend_locally(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Compute attention on DTensors that are sharded by batch and heads only: each rank on its own shard.

    Queries, keys and values are (batch, length, heads, head_dim). Other shardings are undone first; heads stay sharded
    only if the key heads divide too.
    """
    assert isinstance(query, DTensor)
    mesh = query.device_mesh
    placements = [_local_cut(one, index, mesh, key) for index, one in enumerate(query.placements)]
    parts = [one.redistribute(mesh, placements).to_local() for one in (query, key, value)]  # type: ignore[attr-defined]
    out = attend(*parts, mask=_local_mask(mask, mesh, placements), bias=_local_mask(bias, mesh, placements))
    return DTensor.from_local(out, mesh, placements, run_check=False)


def _local_cut(placement: Placement, index: int, mesh: DeviceMesh, key: Tensor) -> Placement:
    if isinstance(placement, Shard) and placement.dim == 0:
        return placement
    if isinstance(placement, Shard) and placement.dim == 2 and key.shape[2] % mesh.size(index) == 0:
        return placement
    return Replicate()


def _local_mask(mask: Tensor | None, mesh: DeviceMesh, placements: list[Placement]) -> Tensor | None:
    """Return the shard of a (batch, heads, queries, keys) mask that belongs to this rank."""
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
