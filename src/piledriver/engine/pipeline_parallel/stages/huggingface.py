"""A stage of a Hugging Face decoder, by the common names model.embed_tokens, layers, norm and lm_head.

The inner model accepts hidden states as `inputs_embeds`, so its own `forward` makes masks and rotary positions.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.errors import LayoutError


def inner_model(model: nn.Module) -> str | None:
    """Return the name of the decoder inside a causal language model, None for other structures."""
    inner = getattr(model, "model", None)
    known = isinstance(inner, nn.Module) and all(
        isinstance(getattr(inner, name, None), nn.Module) for name in ("embed_tokens", "layers", "norm")
    )
    return "model" if known and isinstance(getattr(model, "lm_head", None), nn.Linear) else None


class HuggingFaceStage(nn.Module):
    """Mixed into the class of the split model."""

    def forward(self, x: Tensor, use_cache: bool | None = None, **context: Any) -> Any:
        """Map tokens or hidden states to hidden states or logits. A call may ask for a cache; a stage has none."""
        inner: Any = self.model
        if inner.embed_tokens is not None:
            x = inner.embed_tokens(x)
        if self.lm_head is not None:
            # The model's own forward scales or caps its logits.
            whole: Any = super()
            return whole.forward(inputs_embeds=x, use_cache=False, **context).logits
        return inner(inputs_embeds=x, use_cache=False, **context).last_hidden_state


@torch.no_grad()
def changes_between_layers(inner: nn.Module) -> bool:
    """Whether a decoder without layers and norm changes hidden states, which each stage would repeat."""
    bare: Any = copy.copy(inner)
    bare._modules = {**inner._modules, "layers": nn.ModuleList(), "norm": nn.Identity(), "embed_tokens": None}
    bare = copy.deepcopy(bare)
    if any(tensor.is_meta for tensor in [*bare.parameters(), *bare.buffers()]):
        bare.to_empty(device="cpu")
    hidden = torch.linspace(-1.0, 1.0, 2 * bare.config.hidden_size).view(1, 2, -1)
    found = next((tensor.device for tensor in [*bare.parameters(), *bare.buffers()]), torch.device("cpu"))
    out = bare(inputs_embeds=hidden.to(found), use_cache=False).last_hidden_state
    return not torch.equal(out.cpu(), hidden)


def make_huggingface_stage(shell: nn.Module) -> nn.Module:
    """Give a shallow copy of a model the forward of a stage."""
    inner: Any = shell.model
    if inner.norm is None:
        inner.norm = nn.Identity()
    _keep_layer_types(inner)
    shell.__class__ = type(f"{type(shell).__name__}Stage", (HuggingFaceStage, type(shell)), {})
    return shell


def _keep_layer_types(inner: Any) -> None:
    """Give a decoder the kinds of the layers that it kept: it looks up mask and positions by a layer's place."""
    kinds = getattr(inner.config, "layer_types", None)
    if kinds is None:
        return
    kept = [kinds[int(number)] for number in inner.layers._modules]
    own = copy.copy(inner.config)
    vars(own)["layer_types"] = kept
    if own.layer_types != kept:
        raise LayoutError(f"pp: the layer_types of {type(inner).__name__} cannot be split", fix="use pp=1")
    inner.config = own
