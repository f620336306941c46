"""Fused operators for models that keep their own modules: `transformers`' and users'."""

from __future__ import annotations

from torch import nn

from piledriver.engine.mesh import Mesh


def is_fused(mesh: Mesh) -> bool:
    """Return whether the layout fuses; unless it says, on GPUs only, and not for the plainest layout."""
    layout = mesh.layout
    if layout.fuse is not None:
        return layout.fuse
    return mesh.device_type == "cuda" and layout.reducer != "ddp"


def apply_fused(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Replace operators of a model by fused ones where both compute the same, in place."""
    if not is_fused(mesh):
        return model
    from piledriver.engine.fused.apply import fuse

    return fuse(model, mesh)
