"""A laid-out model's weights as one process would have them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from piledriver.engine.mesh import Meshes


@torch.no_grad()
def whole_state(model: nn.Module, meshes: Meshes) -> dict[str, Any]:
    """The whole state dict on every process, in host memory where it had to be gathered. All must call this."""
    state = {
        key: value.full_tensor().cpu() if isinstance(value, DTensor) else value
        for key, value in model.state_dict().items()
    }
    if meshes.alone or meshes.layout.pp == 1:
        return state
    stages: list[Any] = [None] * meshes.pp.size()
    dist.all_gather_object(stages, state, group=meshes.pp.get_group())
    joined: dict[str, Any] = {}
    for stage in stages:
        joined |= {key: value for key, value in stage.items() if key not in joined}
    return joined
