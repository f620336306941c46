"""Linear layers in fp8: e4m3 in the forward pass, e5m2 for gradients, with dynamic scales.

Scales come from each tensor itself, so there is no history to save. Layers keep their class, name and parameters; only
their `forward` changes. Embeddings, the output layer, experts, and layers whose sizes the hardware rejects or that are
too small to gain stay in bf16.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from piledriver.engine.layout import Layout
from piledriver.kernels.fp8 import MULTIPLE, fp8_gated_mlp, fp8_linear
from piledriver.models.feed_forward.mlp import GatedMLP
from piledriver.optim.shards import local

WORTH = 600.0
"""Smallest product / sum of a layer's sizes for which fp8 pays: casts cost by the sum, products save by the product.
A gated MLP, whose activation is fused with the casts, pays from four fifths of it (docs/fp8.md)."""
_HEADS = frozenset({"head", "lm_head", "embed_out", "output"})


def use_fp8_layers(model: nn.Module, layout: Layout, *, worth: float = WORTH) -> nn.Module:
    """Make the linear layers of a model compute in fp8, in place. Call it before compiling.

    >>> model = nn.Sequential(nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10))
    >>> use_fp8_layers(model, Layout(precision="fp8"))[0](torch.randn(4, 2048)).shape, fp8_layers(model)
    (torch.Size([4, 1024]), ['0'])
    """
    rowwise = layout.precision == "fp8-rowwise"
    for name, module in model.named_modules():
        if isinstance(module, GatedMLP):
            if not rowwise and _fuses(module, worth):
                module.forward = functools.partial(_mlp_forward, module)  # type: ignore[method-assign]
            module.fuse = not _fits("", module.down, worth)
        if isinstance(module, nn.Linear) and _fits(name, module, worth):
            module.forward = functools.partial(_linear_forward, module, rowwise)  # type: ignore[method-assign]
    return model


def fp8_layers(model: nn.Module) -> list[str]:
    """Return the names of the fp8 layers: linear layers, and gated MLPs as one."""
    ours = (_linear_forward, _mlp_forward)
    return [
        name for name, module in model.named_modules() if getattr(vars(module).get("forward"), "func", None) in ours
    ]


def _fits(name: str, layer: nn.Linear, worth: float) -> bool:
    # With tp, the local shard counts; it has its own scale.
    sizes = local(layer.weight).shape
    if name.rpartition(".")[2] in _HEADS or any(size % MULTIPLE for size in sizes):
        return False
    return sizes[0] * sizes[1] >= worth * sum(sizes)


def _fuses(mlp: GatedMLP, worth: float) -> bool:
    """Whether the MLP can be one operator: no biases, and no hooks on its layers."""
    layers = (mlp.gate_up, mlp.down)
    plain = all(layer.bias is None and not layer._forward_hooks and not layer._forward_pre_hooks for layer in layers)
    return plain and mlp.activation == "silu" and all(_fits("", layer, 0.8 * worth) for layer in layers)


def _linear_forward(layer: nn.Linear, rowwise: bool, x: Tensor) -> Tensor:
    x = _in_autocast(x)
    y = fp8_linear(x, layer.weight, rowwise=rowwise)
    return y if layer.bias is None else y + layer.bias.to(y.dtype)


def _mlp_forward(mlp: GatedMLP, x: Tensor) -> Tensor:
    return fp8_gated_mlp(_in_autocast(x), mlp.gate_up.weight, mlp.down.weight, mlp.block)


def _in_autocast(x: Tensor) -> Tensor:
    """Return the tensor in the dtype of autocast, if enabled."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
