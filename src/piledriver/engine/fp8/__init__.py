"""Linear layers in fp8: e4m3 in the forward pass, e5m2 for gradients."""

from __future__ import annotations

from torch import nn

from piledriver.engine.mesh import Mesh


def apply_fp8(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Make the linear layers of a model compute in fp8, in place. Comes before compiling."""
    if not mesh.layout.precision.startswith("fp8"):
        return model
    from piledriver.engine.fp8.apply import use_fp8_layers

    return use_fp8_layers(model, mesh.layout)
