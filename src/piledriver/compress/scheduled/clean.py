"""Make scheduled compression permanent: write the compressed weight, and remove rows and heads that are masked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from piledriver.compress.scheduled.layers import ScheduledLayer, ScheduledLinear, kept_parts, score_name
from piledriver.compress.scheduled.rules import MaskRule
from piledriver.core.errors import UsageError


@torch.no_grad()
def clean_layer(layer: ScheduledLayer) -> dict[str, Tensor]:
    """Turn a layer back into a plain one with the compressed weight; return what stays of rows, channels and heads.

    Every rule is applied, whatever step it begins at. Masked rows and heads are still there, as zeros: `remove_outputs`
    and `remove_inputs` take them away.
    """
    state = layer.state()
    state.step = 2**62
    kept: dict[str, Tensor] = {
        rule.kind: kept_parts(layer, rule)
        for rule in state.rules
        if isinstance(rule, MaskRule) and rule.kind != "weights"
    }
    weight, bias = layer.compressed_weight().detach(), layer.compressed_bias()
    layer.weight.copy_(weight)
    if layer.bias is not None and bias is not None:
        layer.bias.copy_(bias.detach())
    for rule in state.rules:
        if isinstance(rule, MaskRule) and rule.method == "topk":
            delattr(layer, score_name(rule))
    del layer.__dict__["_scheduled"]
    layer.__class__ = nn.Linear if isinstance(layer, ScheduledLinear) else nn.Conv2d  # type: ignore[assignment]
    return kept


@torch.no_grad()
def remove_outputs(layer: Any, kept: Tensor) -> None:
    """Keep these rows of a linear layer, or output channels of a convolution or a batch norm."""
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        for name in ("weight", "bias", "running_mean", "running_var"):
            _keep(layer, name, kept, 0)
        layer.num_features = len(kept)
        return
    if isinstance(layer, nn.Conv2d) and layer.groups != 1:
        raise UsageError(f"a convolution with {layer.groups} groups cannot be narrowed", fix="match others")
    _keep(layer, "weight", kept, 0)
    _keep(layer, "bias", kept, 0)
    name = "out_features" if isinstance(layer, nn.Linear) else "out_channels"
    setattr(layer, name, len(kept))


@torch.no_grad()
def remove_inputs(layer: Any, kept: Tensor) -> None:
    """Keep these input columns of a linear layer, or input channels of a convolution; narrow a batch norm."""
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        remove_outputs(layer, kept)
        return
    if isinstance(layer, nn.Conv2d) and layer.groups != 1:
        raise UsageError(f"a convolution with {layer.groups} groups cannot be narrowed", fix="match others")
    _keep(layer, "weight", kept, 1)
    setattr(layer, "in_features" if isinstance(layer, nn.Linear) else "in_channels", layer.weight.shape[1])


def _keep(layer: nn.Module, name: str, kept: Tensor, dim: int) -> None:
    tensor = getattr(layer, name, None)
    if tensor is None:
        return
    smaller = tensor.detach().index_select(dim, kept.to(tensor.device)).contiguous()
    if isinstance(tensor, nn.Parameter):
        setattr(layer, name, nn.Parameter(smaller, requires_grad=tensor.requires_grad))
    else:
        setattr(layer, name, smaller)
