"""Context parallelism of Hugging Face causal language models, through `transformers`' attention interface.

Hooks around the model shard tokens, positions and labels (labels are shifted first, so that no pair is lost between
shards). With labels, `loss` is that of the full sequences and `logits` are this rank's shard; without, all logits.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.engine.context_parallel.ring_attention import ring_attention
from piledriver.engine.context_parallel.sequence_sharding import SequenceSharding
from piledriver.engine.context_parallel.ulysses import to_heads, to_sequence, with_enough_heads
from piledriver.engine.errors import EngineError, LayoutError
from piledriver.engine.layout import Layout
from piledriver.engine.shards.collectives import all_reduce_sum, pad_to_multiple
from piledriver.kernels.cross_entropy import IGNORE_INDEX

NAME = "piledriver_context"
_SHARDING = "_sequence_sharding"


def is_language_model(model: nn.Module) -> bool:
    """Whether this is a causal language model of `transformers`: a decoder whose every attention is causal."""
    config = getattr(model, "config", None)
    known = hasattr(model, "set_attn_implementation") and hasattr(model, "loss_function")
    if not known or not hasattr(config, "num_attention_heads") or getattr(config, "is_encoder_decoder", False):
        return False
    causal: list[Any] = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    return bool(causal) and all(flag is True for flag in causal)


def split_language_model(model: nn.Module, sharding: SequenceSharding, layout: Layout) -> None:
    """Register the attention and the hooks, in place."""
    door: Any = model
    _check(door, sharding, layout)
    _register()
    _own_config(door)
    door.set_attn_implementation(NAME)
    if door.config._attn_implementation != NAME:
        raise LayoutError(
            f"cp {layout.cp}: {type(model).__name__} does not support choosing its attention",
            fix="use cp=1, with zero and tp",
        )
    for module in model.modules():
        module.__dict__[_SHARDING] = sharding
    model.register_forward_pre_hook(_Before(sharding), with_kwargs=True)
    model.register_forward_hook(_After(sharding), with_kwargs=True)


def _check(model: Any, sharding: SequenceSharding, layout: Layout) -> None:
    config = model.config
    if layout.pp > 1:
        raise LayoutError(f"{type(model).__name__} does not support cp {layout.cp} with pp {layout.pp}", fix="use pp=1")
    heads = config.num_attention_heads // layout.tp
    if not sharding.zigzag and heads % layout.cp:
        raise LayoutError(
            f"cp {layout.cp} by all-to-all does not divide the {heads} heads that tp {layout.tp} leaves",
            fix="use cp_method='ring'",
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise LayoutError(
            f"cp {layout.cp} does not support attn_logit_softcapping of {type(model).__name__}", fix="use cp=1"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    mixing = sorted(kinds) or [name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)]
    if mixing:
        raise LayoutError(
            f"cp {layout.cp}: {mixing[0]} of {type(model).__name__} mixes positions, which cp shards", fix="use cp=1"
        )


def _own_config(model: Any) -> None:
    """Give the model its own config: other models may share the object."""
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if module.__dict__.get("config") is shared:
            module.config = own


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    # The causal mask needs no tensor.
    AttentionMaskInterface.register(NAME, lambda *args, **options: None)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    sharding: SequenceSharding = module.__dict__[_SHARDING]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = options.get("sliding_window")
    if attention_mask is not None or dropout or options.get("softcap") or (window and window < sharding.length):
        raise EngineError(
            f"{type(module).__name__} uses a mask, dropout, a soft cap or a window, which cp does not support",
            fix="turn it off in the config, or use cp=1",
        )
    if options.get("s_aux") is not None or value.shape[-1] != query.shape[-1]:
        raise EngineError(
            f"{type(module).__name__} has sinks or values of another width, which cp does not support", fix="use cp=1"
        )
    if query.shape[2] != key.shape[2]:
        raise EngineError("a key-value cache is not sharded over cp", fix="generate with cp=1")
    if sharding.zigzag:
        out = ring_attention(query, key, value, scale, sharding.group)
    else:
        out = _by_heads(query, key, value, scale, sharding)
    return out.transpose(1, 2).contiguous(), None


def _by_heads(q: Tensor, k: Tensor, v: Tensor, scale: float, sharding: SequenceSharding) -> Tensor:
    group, time = sharding.group, q.shape[2]
    k, v = (with_enough_heads(x, q.shape[1], group.size) for x in (k, v))
    q, k, v = (to_heads(x, group).narrow(2, 0, sharding.length) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    return to_sequence(pad_to_multiple(out, 2, time * group.size), group)


class _Before:
    """Shards the inputs of the model."""

    def __init__(self, sharding: SequenceSharding) -> None:
        self.sharding = sharding

    def __call__(self, module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        sharding, given = self.sharding, dict(given)
        if args:
            given["input_ids"] = args[0]
        ids = given.get("input_ids")
        mask = given.pop("attention_mask", None)
        if ids is None or len(args) > 1 or given.get("past_key_values") is not None:
            raise EngineError(
                "cp takes input_ids, position_ids and labels, by name", fix="leave caches and embeddings out"
            )
        if mask is not None and not bool(mask.all()):
            raise EngineError(
                "cp does not support padding in attention_mask", fix="pad on the right and leave the mask out"
            )
        config: Any = module.config
        if given.get("output_router_logits", getattr(config, "output_router_logits", False)):
            raise EngineError(
                "output_router_logits: under cp the balance loss would be that of a shard of the sequence",
                fix="set output_router_logits to False, or use cp=1",
            )
        sharding.length = ids.shape[1]
        places = torch.arange(sharding.length, device=ids.device).expand_as(ids)
        given_places = given.get("position_ids")
        if given_places is not None and not bool((given_places == places).all()):
            raise EngineError("cp does not support packed documents (position_ids)", fix="use our Transformer for them")
        given |= {"input_ids": sharding.shard(ids, 1), "position_ids": sharding.shard(places, 1), "use_cache": False}
        labels = given.get("labels")
        if labels is not None:
            following = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
            if given.get("num_items_in_batch") is None:
                given["num_items_in_batch"] = (following != IGNORE_INDEX).sum()
            shard = sharding.shard(following - IGNORE_INDEX, 1) + IGNORE_INDEX
            given |= {"labels": shard, "shift_labels": shard}
        return (), given

    def __deepcopy__(self, memo: Any) -> _Before:
        return self


class _After(_Before):
    """Reduces the loss, or gathers the logits."""

    def __call__(self, module: nn.Module, args: Any, given: Any, out: Any = None) -> Any:
        if out.loss is not None:
            out.loss = all_reduce_sum(out.loss, self.sharding.group)
        else:
            out.logits = self.sharding.gather(out.logits, 1)
        return out
