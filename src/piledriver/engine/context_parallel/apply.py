"""Context parallelism: shard every sequence over cp.

Every cp rank is given the full batch and keeps its shard of tokens, rotary positions and targets. Attention covers the
full sequence by ring attention (`ring_attention.py`) or all-to-all over heads (`ulysses.py`). Sequences that cp does
not divide are padded at the end, under the causal mask.

Scale of losses and gradients, for all axes:

- Gradients are averaged over all ranks with different data, dp_replicate * dp_shard * cp (`Mesh.reduce_size`); tp ranks
  hold full gradients.
- A rank returns the loss sums of the batch it was given: with cp those of the full sequence, the same on all cp ranks.
- The gradient of a sum over cp is all-reduced over cp, and the average divides by cp again: the result is the gradient
  of the full sequence's loss, whatever targets are ignored in which shard.
- Gradients of experts are sums over ep, divided by the same `reduce_size`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from piledriver.engine.context_parallel.huggingface import is_language_model, split_language_model
from piledriver.engine.context_parallel.ring_attention import ring_attention
from piledriver.engine.context_parallel.sequence_sharding import SequenceSharding
from piledriver.engine.context_parallel.ulysses import UlyssesAttention
from piledriver.engine.errors import EngineError, LayoutError
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import Mesh
from piledriver.engine.shards.collectives import Group, all_reduce_sum
from piledriver.engine.tensor_parallel.transformer import LocalHeads
from piledriver.kernels.attention import Mask
from piledriver.models import LossSums, ModelConfig, Transformer
from piledriver.models.attention.latent import LatentAttention
from piledriver.models.attention.layer import Attention


def shard_sequences(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Shard the sequences of a model over cp: our `Transformer`, or a causal language model of `transformers`."""
    layout = mesh.layout
    zigzag = layout.cp_method == "ring"
    if is_language_model(model):
        split_language_model(model, SequenceSharding(Group.of(mesh.cp), zigzag=zigzag), layout)
        return model
    if not isinstance(model, Transformer):
        raise LayoutError(
            f"cp {layout.cp} needs to know where {type(model).__name__} uses positions, masks and targets",
            fix="use our Transformer or a causal language model of transformers, or cp=1 with zero and tp",
        )
    check_model(model.config, layout)
    balanced = model.config.moe is not None and model.config.moe.balance_coefficient != 0
    sharding = SequenceSharding(Group.of(mesh.cp), zigzag=zigzag, may_pad=not balanced)
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention):
            _replace_kernel(module, sharding)
    _hook(model, sharding)
    return model


def check_model(config: ModelConfig, layout: Layout) -> None:
    """Raise `LayoutError` for what a method does not support, naming the one that does."""
    if layout.cp_method == "all-to-all":
        heads = config.heads // layout.tp
        if heads % layout.cp:
            nearest = max(n for n in range(1, min(layout.cp, heads) + 1) if heads % n == 0)
            raise LayoutError(
                f"cp {layout.cp} by all-to-all does not divide the {heads} heads that tp {layout.tp} leaves",
                fix=f"use cp={nearest}, or cp_method='ring'",
            )
        return
    reasons = {
        "ALiBi": config.positions == "alibi",
        "a soft cap on scores": config.attention_softcap is not None,
        "a sliding window": config.sliding_window is not None,
        "attention sinks": config.attention_sinks,
        "latent attention": config.latent is not None,
    }
    for reason, there in reasons.items():
        if there:
            raise LayoutError(f"ring attention has no kernel for {reason}", fix="use cp_method='all-to-all'")


class Ring:
    """The ring attention kernel."""

    def __init__(self, sharding: SequenceSharding) -> None:
        self.sharding = sharding

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, **_: Any) -> Tensor:
        _refuse_cache(q, k)
        if mask != Mask():
            raise EngineError(
                "ring attention supports only the causal mask, not document masks", fix="use cp_method='all-to-all'"
            )
        return ring_attention(q, k, v, scale, self.sharding.group)


def _refuse_cache(q: Tensor, k: Tensor) -> None:
    if q.shape[2] != k.shape[2]:
        raise EngineError("a key-value cache is not sharded over cp", fix="generate with cp=1")


def _replace_kernel(attention: Attention | LatentAttention, sharding: SequenceSharding) -> None:
    """Replace the attention kernel, inside of `LocalHeads` where tp shards the heads."""
    holder: Any = attention.kernel if isinstance(attention.kernel, LocalHeads) else None
    inner: Callable[..., Tensor] = attention.kernel if holder is None else holder.inner
    kernel = Ring(sharding) if sharding.zigzag else UlyssesAttention(inner, sharding)
    if holder is None:
        attention.kernel = kernel
    else:
        holder.inner = kernel


def _hook(model: Transformer, sharding: SequenceSharding) -> None:
    if model.embedding is not None:
        model.embedding.register_forward_pre_hook(lambda _, args: _tokens(sharding, args), prepend=True)
    elif model.blocks:
        first = next(iter(model.blocks.values()))
        first.register_forward_pre_hook(lambda _, args: _note_length(sharding, args[0]), prepend=True)
    for by_position in (model.rotary, model.sliding_rotary, model.temperature):
        if by_position is not None:
            by_position.register_forward_hook(lambda _, args, table: _rows(sharding, args[0], table), prepend=True)
    if model.position_embedding is not None:
        model.position_embedding.register_forward_pre_hook(
            lambda _, args: (sharding.shard(args[0], -1), *args[1:]), prepend=True
        )
    model.cross_entropy = ContextParallelLoss(model.cross_entropy, sharding)
    model.token_losses = ContextParallelTokenLosses(model.token_losses, sharding)
    inner = model.project
    model.project = lambda hidden, weight: sharding.gather(inner(hidden, weight), 1)


def _tokens(sharding: SequenceSharding, args: tuple[Any, ...]) -> tuple[Any, ...]:
    sharding.length = args[0].shape[1]
    return (sharding.shard(args[0], 1), *args[1:])


def _note_length(sharding: SequenceSharding, hidden: Tensor) -> None:
    # Later stages receive shards; the rotary hook, where there is one, has set the exact length already.
    length = hidden.shape[1] * sharding.group.size
    if not length - sharding.pieces < sharding.length <= length:
        sharding.length = length


def _rows(sharding: SequenceSharding, length: int, table: Tensor) -> Tensor:
    sharding.length = length
    return sharding.shard(table, 1)


class ContextParallelLoss:
    """The loss sums of the full sequence, the same on every cp rank."""

    def __init__(self, inner: Callable[..., LossSums], sharding: SequenceSharding) -> None:
        self.inner, self.sharding = inner, sharding

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> LossSums:
        sums = self.inner(hidden, weight, self.sharding.shard_targets(targets), **options)
        group = self.sharding.group
        total = all_reduce_sum(sums.total, group)
        rest = [all_reduce_sum(value.detach(), group) for value in sums[1:]]
        return LossSums(total, *cast(list[Any], rest))


class ContextParallelTokenLosses:
    """The loss of every token of the full sequence, on every cp rank."""

    def __init__(self, inner: Callable[..., Tensor], sharding: SequenceSharding) -> None:
        self.inner, self.sharding = inner, sharding

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return self.sharding.gather(self.inner(hidden, weight, self.sharding.shard_targets(targets), **options), 1)
