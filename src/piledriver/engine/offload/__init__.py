"""Offload optimizer states and master weights to host memory or disk; with `parameters`, the weights too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.mesh import Mesh

OFFLOADED = "_offloaded"
"""The attribute of a model that holds its `Offloaded`."""


def apply_offload(model: nn.Module, mesh: Mesh, device: torch.device) -> nn.Module:
    """Move a model's master weights (and weights) to their tier, in place. Before its optimizers are offloaded."""
    if not mesh.layout.offloads or offloaded(model) is not None:
        return model
    from piledriver.engine.offload.apply import offload_weights

    return offload_weights(model, mesh, device)


def parameter_allocator(model: nn.Module, mesh: Mesh) -> Callable[[Tensor], Tensor | None] | None:
    """Return what allocates parameters of a model on the meta device in files; None where they live in memory."""
    if mesh.layout.tiers.parameters != "disk":
        return None
    from piledriver.engine.offload.places import allocate_on_disk

    return allocate_on_disk(model, mesh.layout.tiers)


def measured_norm(tensor: Tensor) -> Tensor | None:
    """Return the norm of a gradient that was measured and dropped (`Offload(gradients="step")`), None for others."""
    stepper = getattr(getattr(tensor, "master_weight", None), "stepper", None)
    found: Tensor | None = None if stepper is None else stepper.norm_of(tensor.master_weight)  # type: ignore[attr-defined]
    return found


def offloaded(model: nn.Module) -> Any:
    """Return the `Offloaded` of a model, None without one."""
    return model.__dict__.get(OFFLOADED)


def undo_offload(model: nn.Module) -> None:
    """Move a model's master weights back into it."""
    if offloaded(model) is not None:
        from piledriver.engine.offload.apply import return_weights

        return_weights(model)
