"""Remove given parts of a model: build the smaller one and copy the parameters that stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from piledriver.compress.structured.shape import SmallerShape
from piledriver.core.errors import UsageError
from piledriver.models import Transformer
from piledriver.models.axes import parameter_axes
from piledriver.models.codes import QuantisedCodes
from piledriver.models.config import ModelConfig, gate_block_of


class KeptParts(NamedTuple):
    """Indices of what stays, ascending. Blocks are named by their old numbers; None and missing blocks keep all."""

    layers: Sequence[int] | None = None
    channels: Tensor | None = None
    """Of the residual stream."""
    groups: Mapping[int, Tensor] = {}
    """Key and value heads of each block."""
    neurons: Mapping[int, Tensor] = {}
    """Of the MLP of each block."""
    experts: Mapping[int, Tensor] = {}
    """Of each block."""


@torch.no_grad()
def cut(model: Transformer, kept: KeptParts) -> Transformer:
    """Return a model without the parts that are not kept; what they computed is lost, the rest is copied exactly.

    >>> model = Transformer(ModelConfig(vocab_size=32, dim=16, layers=2, heads=4, kv_heads=2, mlp_dim=24))
    >>> small = cut(model, KeptParts(layers=[1], neurons={1: torch.arange(8)}))
    >>> small.config.layers, small.blocks["0"].mlp.down.weight.shape
    (1, torch.Size([16, 8]))
    """
    if any(isinstance(module, QuantisedCodes) for module in model.modules()):
        raise UsageError("parts of a quantised model cannot be removed", fix="prune first, then quantise")
    layers = list(range(model.config.layers)) if kept.layers is None else list(kept.layers)
    config = _shape_of(kept, model.config, layers).config_of(model.config, kept_layers=layers)
    with torch.device("meta"):
        small = Transformer(config)
    old, axes = dict(model.named_parameters()), parameter_axes(model)
    place = model.device
    small.to_empty(device=place)
    for name, parameter in small.named_parameters():
        source, layer = _source(name, layers)
        parameter.data = _select(old[source].detach(), source, axes[source], layer, kept, model.config).clone()
        parameter.requires_grad_(old[source].requires_grad)
    for name in ("compute_dtype", "z_loss", "chunk_tokens", "attention_kernel", "generation", "source_config"):
        setattr(small, name, getattr(model, name))
    small.compression = list(model.compression)
    return small.train(model.training)


def _shape_of(kept: KeptParts, config: ModelConfig, layers: Sequence[int]) -> SmallerShape:
    """Return the sizes that stay; every block must keep the same number of each part."""

    def size(parts: Mapping[int, Tensor], what: str, have: list[int]) -> int | None:
        if not parts:
            return None
        sizes = {len(parts[layer]) for layer in have}
        if len(sizes) != 1:
            raise UsageError(f"blocks keep {sorted(sizes)} {what}", fix="keep the same number in every block")
        return sizes.pop()

    with_experts = [layer for layer in layers if config.has_experts(layer)]
    without = [layer for layer in layers if not config.has_experts(layer)]
    return SmallerShape(
        layers=len(layers),
        dim=None if kept.channels is None else len(kept.channels),
        kv_heads=size(kept.groups, "groups", list(layers)),
        mlp_dim=size(kept.neurons, "neurons", without),
        experts=size(kept.experts, "experts", with_experts),
    )


def _source(name: str, layers: Sequence[int]) -> tuple[str, int | None]:
    """Return the name of a parameter in the large model, and its block there."""
    if not name.startswith("blocks."):
        return name, None
    _, number, rest = name.split(".", 2)
    old = layers[int(number)]
    return f"blocks.{old}.{rest}", old


def _select(
    tensor: Tensor, name: str, axes: Sequence[str], layer: int | None, kept: KeptParts, config: ModelConfig
) -> Tensor:
    for dim, axis in enumerate(axes):
        if axis == "embed" and kept.channels is not None:
            tensor = tensor.index_select(dim, kept.channels.to(tensor.device))
        if layer is None:
            continue
        if axis in ("kv_heads", "heads") and layer in kept.groups:
            # Rows or columns come in equal runs, one for each group, whatever a run holds.
            runs = torch.unflatten(tensor, dim, (config.kv_heads, -1))
            tensor = runs.index_select(dim, kept.groups[layer].to(tensor.device)).flatten(dim, dim + 1)
        if axis == "mlp" and layer in kept.neurons and ".mlp." in name and ".experts." not in name:
            neurons = kept.neurons[layer].to(tensor.device)
            fused = "gate_up" in name
            tensor = _select_fused(tensor, neurons) if fused else tensor.index_select(dim, neurons)
        if axis in ("experts", "router") and layer in kept.experts:
            tensor = tensor.index_select(dim, kept.experts[layer].to(tensor.device))
    return tensor


def _select_fused(tensor: Tensor, neurons: Tensor) -> Tensor:
    """Return the gate and up rows of some neurons, alternating in the blocks that the smaller width has."""
    width = tensor.shape[0] // 2
    pairs = torch.unflatten(tensor, 0, (-1, 2, gate_block_of(width))).transpose(1, 2).flatten(0, 1)
    chosen = torch.unflatten(pairs[neurons], 0, (-1, gate_block_of(len(neurons))))
    return chosen.transpose(1, 2).flatten(0, 2)
