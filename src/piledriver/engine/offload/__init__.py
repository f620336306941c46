"""Offload optimizer states and master weights to host memory; with `parameters`, the weights too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piledriver.engine.mesh import Mesh

OFFLOADED = "_offloaded"
"""The attribute of a model that holds its `Offloaded`."""


def apply_offload(model: nn.Module, mesh: Mesh, device: torch.device) -> nn.Module:
    """Move a model's master weights (and weights) to the host, in place. Before its optimizers are offloaded."""
    if not mesh.layout.offloads or offloaded(model) is not None:
        return model
    from piledriver.engine.offload.apply import offload_weights

    return offload_weights(model, mesh.layout, device)


def offloaded(model: nn.Module) -> Any:
    """Return the `Offloaded` of a model, None without one."""
    return model.__dict__.get(OFFLOADED)


def undo_offload(model: nn.Module) -> None:
    """Move a model's master weights back into it."""
    if offloaded(model) is not None:
        from piledriver.engine.offload.apply import return_weights

        return_weights(model)
