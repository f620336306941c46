"""Expert parallelism: experts are sharded over the ep axis, and tokens are dispatched to them by all-to-all."""

from __future__ import annotations

import sys

from torch import nn

from piledriver.engine.mesh import Mesh


def apply_ep(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Shard the experts of a model over the ep axis, in place; average the balance loss over data-parallel ranks."""
    layout = mesh.layout
    if layout.ep == 1 and layout.expert_capacity is None and "piledriver.models.feed_forward.moe" not in sys.modules:
        # Nothing here can be one of our mixtures of experts.
        return model
    from piledriver.engine.expert_parallel.apply import shard_experts

    return shard_experts(model, mesh)
