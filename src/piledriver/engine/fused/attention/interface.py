"""Attention of `transformers`' causal models: packed documents and sliding windows by kernels that skip what is masked.

A model whose attention goes through `transformers`' `AttentionInterface` is given our function there. In place of
`sdpa` it computes what `sdpa` does where the mask is plain or dense; packed documents are variable-length sequences,
and windows are block masks. Models that have no `sdpa` (soft-capped scores, sinks) store all scores; they get flex
attention.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.errors import EngineError
from piledriver.engine.fused.attention.check import Scores, why_attention_differs
from piledriver.engine.fused.attention.masks import has_kernels, make_block_mask, make_mask
from piledriver.engine.fused.plain import in_autocast
from piledriver.engine.torch_private import remove_pre_hooks
from piledriver.kernels.attention import Mask, attend

OPERATION = "attention"
NAMES = {"sdpa": "piledriver", "eager": "piledriver-eager"}
"""Implementation of `transformers` to ours: names in its registries of attention and mask functions."""
_NOTES = {
    "sdpa": "documents by variable-length attention, windows by block masks",
    "eager": "flex attention; attention weights are not returned",
}


def attention_models(model: nn.Module) -> dict[str, Any]:
    """Return the outermost models of `transformers` within a model that have causal attention, by name."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return {}
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        inside = any(not other or name == other or name.startswith(f"{other}.") for other in found)
        if isinstance(module, library.PreTrainedModel) and not inside and _is_causal(module):
            found[name] = module
    return found


def match_attention(model: Any, device: torch.device) -> tuple[bool, str]:
    """Return whether a model's attention can be ours, and how it is computed, or why not."""
    library: Any = sys.modules["transformers.modeling_utils"]
    parts = [module for module in model.modules() if isinstance(module, library.PreTrainedModel)]
    if not has_kernels(device):
        return False, "its kernels for packed documents and windows run on GPUs"
    used = {str(part.config._attn_implementation) for part in parts}
    (implementation,) = used if len(used) == 1 else ("",)
    # Eager attention that was chosen over `sdpa` was chosen for its weights.
    by_choice = implementation == "eager" and any(part._supports_sdpa for part in parts)
    if implementation not in NAMES or by_choice:
        return False, f"its implementation is {' and '.join(sorted(used))}"
    if not all(part._supports_flex_attn and part._can_set_attn_implementation() for part in parts):
        return False, "it does not take other implementations through AttentionInterface"
    if implementation == "eager" and model.config.output_attentions:
        return False, "its config asks for attention weights"
    # Models with `sdpa` need flex attention for windows alone.
    flex = implementation == "eager" or getattr(model.config, "sliding_window", None) is not None
    scores = _scores_of(model) if implementation == "eager" else None
    why = why_attention_differs(model.config, device, flex=flex, scores=scores)
    return (False, why) if why else (True, _NOTES[implementation])


def _scores_of(model: Any) -> Scores:
    sinks = any(isinstance(getattr(module, "sinks", None), Tensor) for module in model.modules())
    return Scores(getattr(model.config, "attn_logit_softcapping", None), sinks)


def install_attention(model: Any) -> None:
    """Make a model of `transformers` compute attention by ours."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAMES["sdpa"], attention_forward)
    AttentionMaskInterface.register(NAMES["sdpa"], make_mask)
    AttentionInterface.register(NAMES["eager"], flex_forward)
    AttentionMaskInterface.register(NAMES["eager"], make_block_mask)
    replaced = model.config._attn_implementation
    model.set_attn_implementation(NAMES[replaced])
    if replaced == "eager":
        model.register_forward_pre_hook(RejectAttentionWeights(), with_kwargs=True)


def uninstall_attention(model: nn.Module) -> None:
    """Give the models of `transformers` within a model their implementation back."""
    for module in attention_models(model).values():
        for original, name in NAMES.items():
            if module.config._attn_implementation == name:
                module.set_attn_implementation(original)
        remove_pre_hooks(module, RejectAttentionWeights)


class RejectAttentionWeights:
    """A hook that rejects a call for attention weights, which flex attention never has."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("output_attentions"):
            raise EngineError(
                "output_attentions: attention of this model was replaced, and its weights are not computed",
                fix="use Layout(fuse=False), or ask an unprepared copy of the model",
            )


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **settings: Any
) -> tuple[Tensor, None]:
    """Return attention, [batch, time, heads, head_dim], in place of `sdpa`. The signature is that of `transformers`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(attention_mask, Mask):
        return _attend(query, key, value, attention_mask, **settings)
    out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    return out


def flex_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """Return attention in place of a model's eager function, which computes dense masks still."""
    if isinstance(attention_mask, Mask):
        return _attend(query, key, value, attention_mask, **settings)
    eager: Any = sys.modules[type(module).__module__]
    out: tuple[Tensor, Tensor | None] = eager.eager_attention_forward(
        module, query, key, value, attention_mask, **settings
    )
    return out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    # Rotary tables are fp32 under autocast, and so are rotated queries and keys.
    query, key, value = in_autocast(query), in_autocast(key), in_autocast(value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # A window is part of the mask.
    out = attend(query, key, value, mask, scale=scale, softcap=softcap, sinks=s_aux)
    return out.transpose(1, 2).contiguous(), None


def _is_causal(model: Any) -> bool:
    decoder = not getattr(model.config, "is_encoder_decoder", False)
    return decoder and any(getattr(module, "is_causal", None) is True for module in model.modules())
