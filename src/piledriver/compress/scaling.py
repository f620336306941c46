"""Move a scale from the input of a linear layer into what produces it: the model computes the same function.

Input channels that matter get larger weights, which round with less relative error; the producer divides by the same
scale. Producers are norms (before `qkv` and the MLP), the values of attention (before `out`) and the up projection
(before `down` of a gated MLP).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from piledriver.models.attention.layer import Attention
from piledriver.models.block import Block
from piledriver.models.feed_forward.mlp import GatedMLP
from piledriver.models.layers import LayerNorm, RMSNorm


class InputScale(NamedTuple):
    """A layer whose input channels can be scaled."""

    layer: str
    """Name in the block."""
    share: Callable[[Tensor], Tensor]
    """Make a scale valid: channels that one producer channel feeds get one value."""
    divide: Callable[[Tensor], None]
    """Divide the producer by a scale."""


def input_scales(block: Block) -> list[InputScale]:
    """Return the layers of a block whose input scale can be moved into its producer without changing the function."""
    found: list[InputScale] = []
    attention, mlp = block.attention, block.mlp
    first = "mlp.gate_up" if isinstance(mlp, GatedMLP) else "mlp.up"
    # A norm after a sublayer, or one that feeds two, is not the producer of one layer's input.
    if not block.post and block.mlp_norm is not None:
        norms = {"attention.qkv": block.attention_norm, first: block.mlp_norm}
        for name, norm in norms.items():
            known = {key for key, _ in block.named_modules()}
            if name in known and isinstance(norm, (RMSNorm, LayerNorm)) and norm.weight is not None:
                found.append(InputScale(name, _same, _norm_divider(norm)))
    if isinstance(attention, Attention) and attention.config.clip_qkv is None and _is_float(attention.qkv):
        found.append(InputScale("attention.out", _shared_by_group(attention), _value_divider(attention)))
    if isinstance(mlp, GatedMLP) and mlp.limit is None and _is_float(mlp.gate_up):
        found.append(InputScale("mlp.down", _same, _up_divider(mlp)))
    return found


@torch.no_grad()
def apply_scale(block: Block, place: InputScale, scale: Tensor) -> None:
    """Multiply the columns of a layer's weight by `scale`, and divide its producer."""
    weight = block.get_submodule(place.layer).weight
    assert isinstance(weight, Tensor)
    weight.mul_(scale.to(weight.dtype))
    place.divide(scale)


def _is_float(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear)


def _same(scale: Tensor) -> Tensor:
    return scale


def _norm_divider(norm: Any) -> Callable[[Tensor], None]:
    def divide(scale: Tensor) -> None:
        if norm.offset:  # the norm multiplies by one plus its weight
            norm.weight.copy_((1.0 + norm.weight.float()) / scale - 1.0)
        else:
            norm.weight.div_(scale)
        if getattr(norm, "bias", None) is not None:
            norm.bias.div_(scale)

    return divide


def _shared_by_group(attention: Attention) -> Callable[[Tensor], Tensor]:
    def share(scale: Tensor) -> Tensor:
        # Query heads of a group read the same values: the geometric mean of their scales.
        heads = scale.view(-1, attention.group, attention.config.head_dim)
        return heads.log().mean(dim=1, keepdim=True).exp().expand_as(heads).reshape(-1)

    return share


def _value_divider(attention: Attention) -> Callable[[Tensor], None]:
    def divide(scale: Tensor) -> None:
        values = scale.view(-1, attention.group, attention.config.head_dim)[:, 0]
        for parameter in (attention.qkv.weight, attention.qkv.bias):
            if parameter is not None:
                rows = torch.unflatten(parameter, 0, (-1, attention.group + 2, attention.config.head_dim))
                rows[:, -1].div_(values if parameter.dim() == 1 else values[..., None])

    return divide


def _up_divider(mlp: GatedMLP) -> Callable[[Tensor], None]:
    def divide(scale: Tensor) -> None:
        blocks = scale.view(-1, mlp.block)
        for parameter in (mlp.gate_up.weight, mlp.gate_up.bias):
            if parameter is not None:
                rows = torch.unflatten(parameter, 0, (-1, 2, mlp.block))
                rows[:, 1].div_(blocks if parameter.dim() == 1 else blocks[..., None])

    return divide
