"""Clip gradients: torch's own functions for replicas, over shards and stages for every other layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from piledriver.engine.mesh import Mesh


def clip_grad_norm(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float, mesh: Mesh) -> Tensor:
    """Scale gradients so that their total norm is at most `max_norm`; return the norm before."""
    if mesh.layout.reducer == "ddp":
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    from piledriver.engine.optimizer.global_norm import clip_sharded_grad_norm

    return clip_sharded_grad_norm(parameters, max_norm, norm_type, mesh)


def clip_grad_value(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clip each gradient's values; where an optimizer steps on a shard of a parameter, those of the shard."""
    held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    nn.utils.clip_grad_value_([getattr(one, "optimizer_shard", one) for one in held], clip_value)
