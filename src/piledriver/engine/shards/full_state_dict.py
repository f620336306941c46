"""A laid-out model's weights as one process would have them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from piledriver.engine.mesh import Mesh


@torch.no_grad()
def full_state_dict(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    """The whole state dict on every process, in host memory where it had to be gathered. All must call this."""
    state = {
        key: value.full_tensor().cpu() if isinstance(value, DTensor) else value
        for key, value in model.state_dict().items()
    }
    if mesh.alone or mesh.layout.pp == 1:
        return state
    stages: list[Any] = [None] * mesh.pp.size()
    dist.all_gather_object(stages, state, group=mesh.pp.get_group())
    joined: dict[str, Any] = {}
    for stage in stages:
        joined |= {key: value for key, value in stage.items() if key not in joined}
    return joined
