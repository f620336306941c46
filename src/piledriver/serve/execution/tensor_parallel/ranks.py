"""How many ranks shard a served model."""

from __future__ import annotations

import torch.distributed as dist

from piledriver.models import Transformer


def tensor_parallel_ranks(model: Transformer) -> tuple[int, int]:
    """Return this rank and the number of ranks that shard a model's matrices; (0, 1) for a model of one process."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    from piledriver.engine.state import state_of  # most of a start is imports: only where it is needed

    state = state_of(model)
    if state is None or state.mesh.alone or state.mesh.layout.tp == 1:
        return 0, 1
    return state.mesh.axis_rank("tp"), state.mesh.layout.tp
