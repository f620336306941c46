"""The processes of a layout as device mesh: three views of the same ranks.

Parameters that every token uses are laid over (pp, dp_replicate, dp_shard, tp), where dp_shard includes cp: processes
that split a sequence hold the same parameters, so these may be shared out among them too. Experts are laid over (pp,
dp_replicate, dp_shard / ep, ep, tp). Batches are read by (dp_replicate, dp_shard) and cut along the sequence by cp.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from piledriver.engine.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """Where this process stands in a layout. An axis of size 1 has a mesh of one process.

    A process that is alone has no process group and so no mesh: steps look at the layout's sizes before they ask.
    Axes are cut out once: torch takes milliseconds each time, and they are asked for by every parameter.
    """

    layout: Layout
    device_type: str
    dense: DeviceMesh
    """(pp, dp_replicate, dp_shard, tp): parameters that every token uses; dp_shard includes cp."""
    batch: DeviceMesh
    """(pp, dp_replicate, dp_shard, cp, tp): who reads which part of which batch."""
    experts: DeviceMesh
    """(pp, dp_replicate, dp_shard, ep, tp): experts; dp_shard * ep here are what share them out."""

    @functools.cached_property
    def tp(self) -> DeviceMesh:
        """Processes that split each matrix."""
        return self.dense["tp"]

    @functools.cached_property
    def pp(self) -> DeviceMesh:
        """One process of each pipeline rank."""
        return self.dense["pp"]

    @functools.cached_property
    def cp(self) -> DeviceMesh:
        """Processes that split each sequence."""
        return self.batch["cp"]

    @functools.cached_property
    def ep(self) -> DeviceMesh:
        """Processes that split the experts."""
        return self.experts["ep"]

    @functools.cached_property
    def shard(self) -> DeviceMesh:
        """Over what dense parameters are averaged and shared out: one dimension, or (replicate, shard)."""
        return (
            self.dense["dp_replicate", "dp_shard"] if self.dense["dp_replicate"].size() > 1 else self.dense["dp_shard"]
        )

    @functools.cached_property
    def shard_group(self) -> DeviceMesh:
        """The processes that share out one copy of the dense parameters."""
        return self.dense["dp_shard"]

    @functools.cached_property
    def state_mesh(self) -> DeviceMesh:
        """What the own rows of dense parameters (zero 1 and 2) are laid over: `shard`, and tp where there is one."""
        names = [*(["dp_replicate"] if self.dense["dp_replicate"].size() > 1 else []), "dp_shard"]
        return self.dense[(*names, "tp")] if self.tp.size() > 1 else self.shard

    @functools.cached_property
    def expert_shard(self) -> DeviceMesh:
        """The same for experts."""
        hybrid = self.experts["dp_replicate"].size() > 1
        return self.experts["dp_replicate", "dp_shard"] if hybrid else self.experts["dp_shard"]

    @property
    def alone(self) -> bool:
        """Whether there is one process and so nothing to talk to."""
        return self.dense is None

    @functools.cached_property
    def dp_groups(self) -> list[DeviceMesh]:
        """The axes over which gradients of dense parameters are averaged, the sharing one first."""
        axes = [] if self.alone else [self.dense["dp_shard"], self.dense["dp_replicate"]]
        return [axis for axis in axes if axis.size() > 1]

    @functools.cached_property
    def expert_dp_groups(self) -> list[DeviceMesh]:
        """The same for experts: processes that hold the same ones."""
        axes = [] if self.alone else [self.experts["dp_shard"], self.experts["dp_replicate"]]
        return [axis for axis in axes if axis.size() > 1]

    @functools.cached_property
    def reduce_size(self) -> int:
        """How many processes hold parts of the data that one gradient is the mean of."""
        return 1 if self.alone else self.dense["dp_shard"].size() * self.dense["dp_replicate"].size()

    @property
    def data_rank(self) -> int:
        """Which of the `layout.data_size` batches this process reads."""
        if self.alone:
            return 0
        _, replicate, shard, _, _ = self._place()
        return replicate * self.batch["dp_shard"].size() + shard

    @property
    def readers(self) -> list[int]:
        """One rank for each of the batches that are read at once, in their order."""
        return [0] if self.alone else [int(rank) for rank in self.batch.mesh[0, :, :, 0, 0].flatten().tolist()]

    @property
    def model_parallel_size(self) -> int:
        """How many processes read the same batch."""
        return self.layout.pp * self.layout.cp * self.layout.tp

    def _place(self) -> tuple[int, ...]:
        place = self.batch.get_coordinate()
        assert place is not None
        return tuple(place)


def make_mesh(layout: Layout, device_type: str) -> Mesh:
    """The mesh of a layout on the processes that are connected. All processes must call this together."""
    device = torch.device(device_type).type
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        nothing: Any = None
        return Mesh(layout.on(1), device, nothing, nothing, nothing)
    layout = layout.on(dist.get_world_size())
    assert layout.dp_replicate is not None
    assert layout.dp_shard is not None
    if layout.zero:
        replicate, shard = layout.dp_replicate, layout.dp_shard * layout.cp
    else:
        # Nothing is shared out: processes of one sequence are copies of each other too.
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
        _mesh(device, dense, ("pp", "dp_replicate", "dp_shard", "tp")),
        _mesh(device, batch, ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
        _mesh(device, experts, ("pp", "dp_replicate", "dp_shard", "ep", "tp")),
    )


_made: dict[tuple[Any, ...], tuple[Any, DeviceMesh]] = {}
"""Mesh never change, and each costs threads and connections: those of one shape are made once per connected world."""


def _mesh(device: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    world, key = dist.group.WORLD, (device, sizes, names)
    for other in [known for known, (group, _) in _made.items() if group is not world]:
        # Of a world that is gone: its threads and connections can go too.
        del _made[other]
    if key not in _made:
        _made[key] = world, init_device_mesh(device, sizes, mesh_dim_names=names)
    return _made[key][1]
