"""Linear layers in fp8: e4m3 in the forward pass, e5m2 for gradients, with dynamic scales.

Scales come from each tensor itself, so there is no history to save. Layers keep their class, name and parameters; only
their `forward` changes. Embeddings, the output layer, experts, and layers whose sizes the hardware rejects or that are
too small to gain stay in bf16.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.fused.gated_mlp import Parts, joined_gate_up, linear_shapes, mlp_parts
from piledriver.engine.fused.output_layer import output_layers
from piledriver.engine.fused.plain import in_autocast, why_special_linear
from piledriver.engine.layout import Layout
from piledriver.engine.torch_private import has_hooks
from piledriver.kernels.fp8 import MULTIPLE, fp8_gated_mlp, fp8_linear
from piledriver.models.feed_forward.mlp import GatedMLP
from piledriver.models.layers import Linear
from piledriver.optim.shards import local

WORTH = 600.0
"""Smallest product / sum of a layer's sizes for which fp8 pays: casts cost by the sum, products save by the product.
A gated MLP, whose activation is fused with the casts, pays from four fifths of it (docs/fp8.md)."""
_HEADS = frozenset({"head", "lm_head", "embed_out", "output"})


def use_fp8_layers(model: nn.Module, layout: Layout, *, worth: float | None = None) -> nn.Module:
    """Make the linear layers of a model compute in fp8, in place. Call it before compiling.

    >>> model = nn.Sequential(nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10))
    >>> use_fp8_layers(model, Layout(precision="fp8"))[0](torch.randn(4, 2048)).shape, fp8_layers(model)
    (torch.Size([4, 1024]), ['0'])
    """
    worth = WORTH if worth is None else worth
    rowwise = layout.precision == "fp8-rowwise"
    heads = output_layers(model)
    for name, module in model.named_modules():
        if isinstance(module, GatedMLP):
            if not rowwise and _fuses(module, worth):
                _install(module, _mlp_forward)
            module.fuse = not _fits("", module.down, worth)
        parts = mlp_parts(module)
        if parts is not None and not rowwise and _fuses_parts(module, parts, worth):
            _install(module, _forward_of_parts(parts))
        if isinstance(module, nn.Linear) and name not in heads and _fits(name, module, worth):
            _install(module, _row_forward if rowwise else _linear_forward)
    return model


def _install(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    # A bound method: compiled blocks share a graph, where partial objects would be compared by identity.
    module.forward = types.MethodType(forward, module)


def fp8_layers(model: nn.Module) -> list[str]:
    """Return the names of the fp8 layers: linear layers, and gated MLPs as one."""
    return [
        name
        for name, module in model.named_modules()
        if getattr(getattr(vars(module).get("forward"), "__func__", None), "is_fp8", False)
    ]


def _fits(name: str, layer: nn.Linear, worth: float) -> bool:
    # With tp, the local shard counts; it has its own scale.
    sizes = local(layer.weight).shape
    if name.rpartition(".")[2] in _HEADS or any(size % MULTIPLE for size in sizes):
        return False
    # Quantised layers and layers of adapters compute in their own way.
    usual = type(layer).forward in (nn.Linear.forward, Linear.forward)
    usual = usual and type(local(layer.weight)) in (nn.Parameter, torch.Tensor) and layer.weight.is_floating_point()
    return usual and _pays(sizes, worth)


def _fuses(mlp: GatedMLP, worth: float) -> bool:
    """Whether the MLP can be one operator: no biases, no clamps, and no hooks on its layers."""
    layers = (mlp.gate_up, mlp.down)
    plain = mlp.limit is None and all(layer.bias is None and not has_hooks(layer) for layer in layers)
    return plain and mlp.activation == "silu" and all(_fits("", layer, 0.8 * worth) for layer in layers)


def _fuses_parts(mlp: nn.Module, parts: Parts, worth: float) -> bool:
    """Whether a gated MLP of another library can be one operator."""
    layers: list[Any] = [getattr(mlp, name) for name in (parts.gate, parts.up, parts.down) if name]
    plain = all(layer.bias is None and why_special_linear(layer) is None for layer in layers)
    if not plain or parts.activation != "silu":
        return False
    dim, width = linear_shapes(mlp)[parts.down]
    shapes = ((2 * width, dim), (dim, width))
    return not any(size % MULTIPLE for size in (dim, width)) and all(_pays(shape, 0.8 * worth) for shape in shapes)


def _pays(sizes: Any, worth: float) -> bool:
    return bool(sizes[0] * sizes[1] >= worth * (sizes[0] + sizes[1]))


def _linear_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return _with_bias(fp8_linear(in_autocast(x), layer.weight), layer.bias)


def _row_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return _with_bias(fp8_linear(in_autocast(x), layer.weight, rowwise=True), layer.bias)


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


def _mlp_forward(mlp: GatedMLP, x: Tensor) -> Tensor:
    return fp8_gated_mlp(in_autocast(x), mlp.gate_up.weight, mlp.down.weight, mlp.block)


@functools.cache
def _forward_of_parts(parts: Parts) -> Callable[..., Tensor]:
    """Return the forward of a gated MLP of another library: one function for all alike."""

    def forward(mlp: Any, x: Tensor) -> Tensor:
        layers = [getattr(mlp, name) for name in (parts.gate, parts.up, parts.down) if name]
        if any(has_hooks(layer) for layer in layers):
            # Hooked since: the layers compute one by one.
            return type(mlp).forward(mlp, x)  # type: ignore[no-any-return]
        weight, _ = joined_gate_up(mlp, parts, layers[0].weight.dtype)
        return fp8_gated_mlp(in_autocast(x), weight, layers[-1].weight, weight.shape[0] // 2)

    forward.is_fp8 = True  # type: ignore[attr-defined]
    return forward


_mark: Any
for _mark in (_linear_forward, _row_forward, _mlp_forward):
    _mark.is_fp8 = True
