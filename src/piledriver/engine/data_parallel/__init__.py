"""Data parallelism: ZeRO 0 to 3 (Rajbhandari et al., 2020), torch DDP, and synchronised batch-norm statistics.

| zero | parameters | gradients | optimizer states | implementation |
|---|---|---|---|---|
| 0 | replicated | replicated | replicated | averaged in buckets (`reducer.py`), or by torch DDP (`ddp.py`) |
| 1 | replicated | replicated | 1 / N | the same; the optimizer steps on its shard (`shards/owned_rows.py`) |
| 2 | replicated | 1 / N | 1 / N | reduce-scatter: each rank receives the rows that it steps on |
| 3 | 1 / N | 1 / N | 1 / N | torch's `fully_shard`, block by block (`zero.py`) |

N is dp_shard * cp; with dp_replicate, gradients are also averaged across the replicas. These functions decide whether a
layout needs a step, and import its implementation only then.
"""

from __future__ import annotations

from torch import nn

from piledriver.engine.mesh import Mesh
from piledriver.engine.options import DDPOptions
from piledriver.engine.state import Reducer


def apply_zero(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Zero 3: shard parameters over the data-parallel ranks, in place; also on the meta device."""
    if mesh.layout.zero != 3 or mesh.alone or mesh.shard.size() == 1:
        return model
    from piledriver.engine.data_parallel.zero import shard_parameters

    return shard_parameters(model, mesh)


def attach_reducer(model: nn.Module, mesh: Mesh, options: DDPOptions) -> Reducer | None:
    """Average gradients in every backward from now on; None where `fully_shard` does it."""
    if mesh.reduce_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return None
    if mesh.layout.reducer == "ddp":
        from piledriver.engine.data_parallel.ddp import DDPReducer

        return DDPReducer(model, options)
    if mesh.layout.zero == 3 and mesh.shard.size() > 1:
        return None
    from piledriver.engine.data_parallel.zero import bucketed_reducer

    return bucketed_reducer(model, mesh)


def sync_buffers(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Give all replicas the running statistics of the first one after each training forward, as torch DDP does."""
    if mesh.reduce_size == 1 or mesh.layout.reducer == "ddp":
        return model
    from piledriver.engine.data_parallel.batch_norm import attach_buffer_sync

    return attach_buffer_sync(model, mesh)


def unsync_buffers(model: nn.Module) -> None:
    """Undo `sync_buffers`."""
    if model._forward_hooks:
        from piledriver.engine.data_parallel.batch_norm import remove_buffer_sync

        remove_buffer_sync(model)
