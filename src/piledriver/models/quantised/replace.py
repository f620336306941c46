"""Put quantised layers in the place of dense ones."""

from __future__ import annotations

from torch import nn

from piledriver.core.errors import UsageError
from piledriver.kernels.linear import WeightKind
from piledriver.models.codes import QuantisedCodes
from piledriver.models.feed_forward.mlp import GatedMLP
from piledriver.models.layers import Linear
from piledriver.models.quantised.linear import QuantisedLinear
from piledriver.models.quantised.vocabulary import check_vocabulary, quantise_head
from piledriver.models.transformer import Transformer


def quantise_linears(model: Transformer, kind: WeightKind, *, head: WeightKind | None = None) -> Transformer:
    """Replace the linear layers of all blocks by quantised ones, in place; return the model.

    `head` quantises the output projection too, and with it a tied embedding. Experts and routers are not quantised.
    """
    if model.config.moe is not None:
        raise UsageError("experts cannot be quantised", fix="serve the model in 16 bits")
    if model.config.latent is not None:
        raise UsageError("latent attention cannot be quantised", fix="serve the model in 16 bits")
    check_vocabulary(model.config, head=head)
    for block in model.blocks.values():
        for module in list(block.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Linear):
                    setattr(module, name, QuantisedLinear.from_linear(child, kind))
            if isinstance(module, GatedMLP):
                module.fuse = False
    if head is not None:
        quantise_head(model, head)
    return model


def replace_layer(model: nn.Module, name: str, layer: QuantisedCodes) -> None:
    """Put a quantised layer in the place of the layer `name`, with its bias; MLPs then use no fused kernel."""
    parent, _, last = name.rpartition(".")
    module = model.get_submodule(parent)
    bias = getattr(getattr(module, last), "bias", None)
    if isinstance(layer, QuantisedLinear) and bias is not None and layer.bias is None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    setattr(module, last, layer)
    if isinstance(module, GatedMLP):
        module.fuse = False
