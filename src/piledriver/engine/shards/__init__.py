"""Sharded tensors: local shards, collectives that gradients flow through, and full state dicts."""

from __future__ import annotations

from typing import Any

from torch import nn

from piledriver.engine.mesh import Mesh


def gather_state_dict(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    """Return a model's full weights under its own keys, on every rank."""
    if mesh.layout.reducer == "ddp":
        return model.state_dict()
    from piledriver.engine.shards.full_state_dict import full_state_dict

    return full_state_dict(model, mesh)


def gather_stages(model: nn.Module, mesh: Mesh) -> Any:
    """Return what every rank can save together: the model, or its full weights where stages hold different ones."""
    return model if mesh.layout.pp == 1 else gather_state_dict(model, mesh)
