"""Host memory as a second tier: optimizer states and master weights there, and with `parameters` the weights too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piledriver.engine.mesh import Mesh

OFFLOADED = "_offloaded"
"""Where a model keeps what it has on the host."""


def apply_offload(model: nn.Module, mesh: Mesh, device: torch.device) -> nn.Module:
    """Move a model's master weights (and weights) to the host, in place. Comes before its optimizers."""
    if not mesh.layout.offloads or offloaded(model) is not None:
        return model
    from piledriver.engine.offload.apply import offload_weights

    return offload_weights(model, mesh.layout, device)


def offloaded(model: nn.Module) -> Any:
    """Return what a model has on the host, None where it has nothing there."""
    return model.__dict__.get(OFFLOADED)


def undo_offload(model: nn.Module) -> None:
    """Give a model its master weights back; nothing else holds them then."""
    if offloaded(model) is not None:
        from piledriver.engine.offload.apply import return_weights

        return_weights(model)
