"""The cost of a block of our `Transformer`, from its config alone.

The kept tensors are those that autograd saves (eager) or that the compiler's min-cut partitioner saves (compiled);
tests compare both lists with traces on fake tensors. The search asks for thousands of them, which traces would slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from piledriver.models.config import ModelConfig
from piledriver.plan.blocks.attention import attention_operators, kept_by_attention, kept_products_of_attention
from piledriver.plan.blocks.budget import kept_within_budget, last_product, recomputed_within_budget
from piledriver.plan.blocks.exchanges import backward_of, block_exchanges, forward_of
from piledriver.plan.blocks.feed_forward import kept_by_mlp, kept_products_of_mlp, mlp_operators
from piledriver.plan.blocks.fp8 import CASTS, GATE, fp8_parameters, gate_gradient, gradient_casts
from piledriver.plan.blocks.launches import block_launches
from piledriver.plan.blocks.operators import BlockCost, Kept, Operator, gradients_of
from piledriver.plan.blocks.per_model import cached_per_model
from piledriver.plan.blocks.setting import BlockSetting
from piledriver.plan.blocks.widths import Widths

# Products of a flash attention backward relative to its forward: it recomputes the scores.
_ATTENTION_BACKWARD = 2.5
# Traffic of an elementwise backward relative to its forward: it reads the gradient besides what the forward read. Ours
# also sums gradients of weights in fp32.
_BACKWARD, _OWN_BACKWARD = 1.5, 2.0


@cached_per_model
def block_cost(config: ModelConfig, window: int | None, setting: BlockSetting, experts: bool = True) -> BlockCost:
    """Return the cost of one block whose attention window is `window` (None for full attention).

    `experts` is False for a dense block of a model whose other blocks have experts.
    """
    widths = Widths(config, window, setting, experts=experts)
    forward = (*attention_operators(widths), *mlp_operators(widths))
    backward = tuple(back for one in forward for back in _backward_of(one, widths))
    kept = _kept(widths, forward)
    full = replace(setting, activations="keep", recompute_norms=False)
    everything = sum(one.bytes for one in _kept(Widths(config, window, full, experts=experts), forward))
    extra = 0.0
    if setting.activations in ("full", "selective"):
        extra = max(0.0, everything - sum(one.bytes for one in kept))
    pairs = block_exchanges(widths)
    there, back = forward_of(pairs), backward_of(pairs)
    if setting.activations == "full" and setting.traits.recompute_exchanges:
        back = (*back, *there)
    return BlockCost(
        forward=forward,
        backward=backward,
        recompute=_recomputed(widths, forward),
        kept=kept,
        forward_workspace=_forward_workspace(widths),
        backward_workspace=_backward_workspace(widths) + extra,
        forward_exchanges=there,
        backward_exchanges=back,
        kernels=block_launches(widths),
        fp8_parameters=fp8_parameters(widths),
    )


def _backward_of(operator: Operator, w: Widths) -> list[Operator]:
    """Return the operators of one operator's backward."""
    if operator.kind == "matmul":
        return [*gradient_casts(w, operator), *_gradients(operator, w)]
    if operator.name == CASTS:
        return []
    if operator.name == GATE:
        return [gate_gradient(operator)]
    if operator.kind == "attention":
        return [replace(operator, flops=_ATTENTION_BACKWARD * operator.flops, bytes=2 * operator.bytes)]
    passes = _OWN_BACKWARD if w.setting.traits.name == "piledriver" else _BACKWARD
    return [replace(operator, bytes=passes * operator.bytes)]


def _gradients(operator: Operator, w: Widths) -> list[Operator]:
    by_input, by_weight = gradients_of(operator, w.size)
    if w.setting.precision == "fp8-rowwise" and operator.precision == "fp8":
        # It sums over rows, whose scales differ.
        by_weight = replace(by_weight, precision=w.setting.wide_precision)
    elif operator.precision == "fp8" and w.setting.casts and w.setting.traits.name == "piledriver":
        by_weight = replace(by_weight, precision="fp8-fp32")
    return [by_input, by_weight]


def _recomputed(w: Widths, forward: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Return what the backward computes again. The last product of a block is never needed."""
    setting = w.setting
    if setting.activations == "full":
        last = last_product(forward)
        if setting.traits.name in ("megatron", "llm-foundry"):
            return forward  # reentrant checkpointing runs the whole block
        return tuple(one for index, one in enumerate(forward) if index < last)
    cheap = tuple(one for one in forward if one.kind == "memory")
    if setting.activations == "selective":
        if not setting.traits.flash_attention:
            return tuple(one for one in forward if one.name in ("scores", "softmax", "weighted values"))
        return (*cheap, *_alternate(w, forward)) if setting.traits.alternate_products else cheap
    if setting.activations == "budget" and setting.budget < 1.0:
        if setting.compiled:
            return recomputed_within_budget(w, forward, [*kept_by_attention(w), *kept_by_mlp(w)])
        return tuple(replace(one, flops=one.flops * (1 - setting.budget), shape=None) for one in forward)
    return tuple(one for one in cheap if one.name == "norm") if setting.recompute_norms else ()


def _alternate(w: Widths, forward: tuple[Operator, ...]) -> Iterator[Operator]:
    """Yield every second product of a block (`alternate_products`): keys, the attention's output, half of the gate."""
    shares = {"qkv": w.kv / (w.q + 2 * w.kv), "out": 1.0, "up": 0.5 if w.gated else 0.0}
    for one in forward:
        share = shares.get(one.name, 0.0)
        if one.kind == "matmul" and share:
            yield replace(one, flops=share * one.flops, bytes=share * one.bytes)


def _kept(w: Widths, forward: tuple[Operator, ...]) -> tuple[Kept, ...]:
    """Return the tensors that the forward keeps for the backward."""
    setting = w.setting
    if setting.activations == "full":
        return (w.keep("block input", w.stream),)
    if setting.activations == "selective":
        return _kept_selective(w)
    found = (*kept_by_attention(w), *kept_by_mlp(w))
    if setting.activations == "budget" and setting.budget < 1.0:
        if setting.compiled:
            return kept_within_budget(w, forward, list(found))
        return tuple(Kept(one.name, one.bytes * setting.budget) for one in found)
    return found


def _kept_selective(w: Widths) -> tuple[Kept, ...]:
    setting = w.setting
    if not setting.traits.flash_attention:
        # Megatron's selective recomputation: everything but the scores.
        everything = (*kept_by_attention(w), *kept_by_mlp(w))
        return tuple(one for one in everything if "score" not in one.name)
    if setting.traits.alternate_products:
        # Of seven products the first, third, fifth and seventh; a compiled backward does not use the last.
        last = [] if setting.compiled else [w.keep("MLP output", w.stream)]
        return (
            w.keep("block input", w.stream),
            w.keep("queries and values", w.q + w.kv),
            w.keep("attention output", w.q),
            w.keep("gates", w.inner),
            *last,
        )
    return (*kept_products_of_attention(w), *kept_products_of_mlp(w))


def _forward_workspace(w: Widths) -> float:
    """Return the bytes of temporaries at the MLP, the widest place of the forward."""
    wide = w.inner * (3 if w.gated else 2)
    if w.moe is not None:
        wide *= w.expert_rows / w.tokens
    casts = w.mlp_parameters * w.size if w.setting.casts else 0.0
    return w.tokens * (wide + w.dim) * w.size + casts


def _backward_workspace(w: Widths) -> float:
    """Return the bytes of temporaries at the MLP, the widest place of the backward, with one weight gradient."""
    wide = w.inner * (4 if w.gated else 2)
    if w.moe is not None:
        wide *= w.expert_rows / w.tokens
    rows = w.inner * (2 if w.gated else 1) * w.dim
    weight = rows * (w.size + (0 if w.size == 4 else 4)) if w.moe is None else 0.0
    # Products for weight gradients want the tokens of all sequences in one order.
    orders = 2 if w.setting.traits.reordered_gathers and w.setting.tp > 1 and w.setting.sequences > 1 else 1
    return orders * w.tokens * (wide + 2 * w.dim) * w.size + weight
