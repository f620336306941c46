"""The ranks of a layout as device meshes: three views of the same ranks.

Dense parameters use (pp, dp_replicate, dp_shard, tp), where dp_shard includes cp: ranks that shard a sequence hold the
same parameters, so ZeRO shards over them too. Experts use (pp, dp_replicate, dp_shard / ep, ep, tp). Batches are read
by (dp_replicate, dp_shard) and sharded along the sequence by cp.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from piledriver.engine.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """The ranks of a resolved layout, and this rank's place among them. An axis of size 1 has a mesh of one rank.

    A single process, and replicas that torch DDP reduces, have no device meshes: steps check the layout's sizes first.
    Axes are cached: slicing a mesh is slow, and every parameter needs them.
    """

    layout: Layout
    device_type: str
    size: int
    """World size."""
    rank: int
    dense: DeviceMesh
    """(pp, dp_replicate, dp_shard, tp): dense parameters; dp_shard includes cp."""
    batch: DeviceMesh
    """(pp, dp_replicate, dp_shard, cp, tp): which rank reads which shard of which batch."""
    experts: DeviceMesh
    """(pp, dp_replicate, dp_shard, ep, tp): experts, sharded over dp_shard * ep."""

    @functools.cached_property
    def tp(self) -> DeviceMesh:
        """Ranks that shard each matrix."""
        return self.dense["tp"]

    @functools.cached_property
    def pp(self) -> DeviceMesh:
        """Ranks of one pipeline."""
        return self.dense["pp"]

    @functools.cached_property
    def cp(self) -> DeviceMesh:
        """Ranks that shard each sequence."""
        return self.batch["cp"]

    @functools.cached_property
    def ep(self) -> DeviceMesh:
        """Ranks that shard the experts."""
        return self.experts["ep"]

    @functools.cached_property
    def shard(self) -> DeviceMesh:
        """The axes over which dense gradients are averaged: (dp_shard), or (dp_replicate, dp_shard)."""
        return (
            self.dense["dp_replicate", "dp_shard"] if self.dense["dp_replicate"].size() > 1 else self.dense["dp_shard"]
        )

    @functools.cached_property
    def shard_group(self) -> DeviceMesh:
        """Ranks that shard one replica of the dense parameters."""
        return self.dense["dp_shard"]

    @functools.cached_property
    def state_mesh(self) -> DeviceMesh:
        """The mesh of optimizer shards (zero 1 and 2): `shard`, and tp if above 1."""
        names = [*(["dp_replicate"] if self.dense["dp_replicate"].size() > 1 else []), "dp_shard"]
        return self.dense[(*names, "tp")] if self.tp.size() > 1 else self.shard

    @functools.cached_property
    def expert_shard(self) -> DeviceMesh:
        """`shard` for experts."""
        hybrid = self.experts["dp_replicate"].size() > 1
        return self.experts["dp_replicate", "dp_shard"] if hybrid else self.experts["dp_shard"]

    @functools.cached_property
    def device_mesh(self) -> DeviceMesh | None:
        """The axes of `dense` that have several ranks, for code that takes one DeviceMesh; None on a single rank."""
        names = [] if self.dense is None else list(self.dense.mesh_dim_names or ())
        several = tuple(name for name in names if self.dense[name].size() > 1)
        return self.dense[several] if several else None

    @property
    def alone(self) -> bool:
        """Whether the world is a single process."""
        return self.size == 1

    @functools.cached_property
    def dp_groups(self) -> list[DeviceMesh]:
        """The axes over which dense gradients are averaged, dp_shard first."""
        axes = [] if self.dense is None else [self.dense["dp_shard"], self.dense["dp_replicate"]]
        return [axis for axis in axes if axis.size() > 1]

    @functools.cached_property
    def expert_dp_groups(self) -> list[DeviceMesh]:
        """`dp_groups` for experts: ranks that hold the same ones."""
        axes = [] if self.experts is None else [self.experts["dp_shard"], self.experts["dp_replicate"]]
        return [axis for axis in axes if axis.size() > 1]

    @functools.cached_property
    def reduce_size(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return self.size if self.dense is None else self.dense["dp_shard"].size() * self.dense["dp_replicate"].size()

    def sum_over_data(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks whose gradients are averaged."""
        total = value.clone()
        if self.dense is None and not self.alone:
            dist.all_reduce(total)
        for axis in self.dp_groups:
            dist.all_reduce(total, group=axis.get_group())
        return total

    @property
    def data_rank(self) -> int:
        """Which of the `layout.data_size` batches this rank reads."""
        if self.batch is None:
            return self.rank
        _, replicate, shard, _, _ = self._coordinate()
        return replicate * self.batch["dp_shard"].size() + shard

    @property
    def readers(self) -> list[int]:
        """One rank for each batch that is read per step, in their order."""
        if self.batch is None:
            return list(range(self.size))
        return [int(rank) for rank in self.batch.mesh[0, :, :, 0, 0].flatten().tolist()]

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that read the same batch."""
        return self.layout.pp * self.layout.cp * self.layout.tp

    def axis_rank(self, axis: str) -> int:
        """Return this rank's index on an axis of `batch`."""
        return 0 if self.batch is None else int(self.batch[axis].get_local_rank())

    def _coordinate(self) -> tuple[int, ...]:
        place = self.batch.get_coordinate()
        assert place is not None
        return tuple(place)


def make_mesh(layout: Layout, device_type: str) -> Mesh:
    """Return the mesh of a layout over the connected ranks. All ranks must call this together."""
    device = torch.device(device_type).type
    connected = dist.is_available() and dist.is_initialized()
    size, rank = (dist.get_world_size(), dist.get_rank()) if connected else (1, 0)
    layout = layout.on(size).for_device(device)
    if size == 1 or layout.reducer == "ddp":
        nothing: Any = None
        return Mesh(layout, device, size, rank, nothing, nothing, nothing)
    assert layout.dp_replicate is not None
    assert layout.dp_shard is not None
    if layout.zero:
        replicate, shard = layout.dp_replicate, layout.dp_shard * layout.cp
    else:
        # Nothing is sharded: the ranks of one sequence are replicas too.
        replicate, shard = layout.dp_replicate * layout.cp, 1
    over = replicate * shard if layout.zero == 0 else shard
    expert_replicate = 1 if layout.zero == 0 else replicate
    batch = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
    dense = (layout.pp, replicate, shard, layout.tp)
    experts = (layout.pp, expert_replicate, over // layout.ep, layout.ep, layout.tp)
    assert math.prod(batch) == math.prod(dense) == math.prod(experts)
    return Mesh(
        layout,
        device,
        size,
        rank,
        _mesh(device, dense, ("pp", "dp_replicate", "dp_shard", "tp")),
        _mesh(device, batch, ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
        _mesh(device, experts, ("pp", "dp_replicate", "dp_shard", "ep", "tp")),
    )


_made: dict[tuple[Any, ...], tuple[Any, DeviceMesh]] = {}
"""One mesh per shape and process group: each costs threads and connections."""


def _mesh(device: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    world, key = dist.group.WORLD, (device, sizes, names)
    for other in [known for known, (group, _) in _made.items() if group is not world]:
        # Its process group was destroyed.
        del _made[other]
    if key not in _made:
        _made[key] = world, init_device_mesh(device, sizes, mesh_dim_names=names)
    return _made[key][1]
