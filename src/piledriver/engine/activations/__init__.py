"""Activation memory: checkpointing (Chen et al., 2016), budgets and offload."""

from __future__ import annotations

from torch import nn

from piledriver.engine.mesh import Mesh


def apply_activation_checkpointing(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Make the blocks of a model keep, recompute or offload their activations as the layout says, in place."""
    layout = mesh.layout
    if layout.activations == "keep" and not layout.activation_offload and not layout.recompute_norms:
        return model
    from piledriver.engine.activations.checkpoint import checkpoint_blocks

    return checkpoint_blocks(model, mesh)
