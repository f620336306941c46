"""The collectives of a block and of the ends of a model: tensor, context and expert parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from piledriver.models.config import ModelConfig
from piledriver.plan.blocks.operators import CollectiveKind, Exchange
from piledriver.plan.blocks.parameters import ParameterShape, parts_of
from piledriver.plan.blocks.setting import BlockSetting
from piledriver.plan.blocks.widths import Widths

# Parameters that read the residual stream as it is: with sequence parallelism their gradients are partial sums.
_OF_STREAM = frozenset({"embed", "latent", "gate"})
_ALWAYS_PARTIAL = (("head_dim",), ("activation",))


@dataclass(frozen=True, slots=True)
class ExchangePair:
    """A differentiable collective: its kind in the forward and in the backward (None for nothing)."""

    forward: CollectiveKind | None
    backward: CollectiveKind | None
    axis: str
    bytes: float
    count: int = 1
    backward_bytes: float | None = None
    """Bytes of the backward where they differ."""


def forward_of(pairs: Iterable[ExchangePair]) -> tuple[Exchange, ...]:
    """Return the collectives of the forward."""
    return tuple(Exchange(one.forward, one.axis, one.bytes, one.count) for one in pairs if one.forward and one.count)


def backward_of(pairs: Iterable[ExchangePair]) -> tuple[Exchange, ...]:
    """Return the collectives of the backward."""
    return tuple(
        Exchange(one.backward, one.axis, one.bytes if one.backward_bytes is None else one.backward_bytes, one.count)
        for one in pairs
        if one.backward and one.count
    )


def block_exchanges(w: Widths) -> list[ExchangePair]:
    """Return the collectives of one block."""
    return [*_tensor(w), *_context(w), *_expert(w)]


def into_heads(setting: BlockSetting, size: float) -> ExchangePair:
    """Return the exchange before a column-parallel product whose whole input has `size` bytes."""
    if setting.sequence_parallel:
        gathered = size / setting.itemsize if setting.gathers_fp8 else size
        return ExchangePair("all-gather", "reduce-scatter", "tp", gathered, backward_bytes=size)
    return ExchangePair(None, "all-reduce", "tp", size)


def out_of_heads(setting: BlockSetting, size: float) -> ExchangePair:
    """Return the exchange after a row-parallel product whose whole output has `size` bytes."""
    if setting.sequence_parallel:
        gathered = size / setting.itemsize if setting.gathers_fp8 else size
        return ExchangePair("reduce-scatter", "all-gather", "tp", size, backward_bytes=gathered)
    return ExchangePair("all-reduce", None, "tp", size)


def partial_gradients(shapes: Iterable[ParameterShape], setting: BlockSetting) -> Iterator[ExchangePair]:
    """Yield the sums of gradients that tp ranks hold in parts: of norms with sequence parallelism, of QK-norms."""
    size = setting.itemsize if setting.gathered or setting.precision.endswith("-pure") else 4
    if setting.traits.name != "piledriver":
        return
    for one in shapes:
        if one.axes in _ALWAYS_PARTIAL or (setting.sequence_parallel and _OF_STREAM.issuperset(one.axes)):
            yield ExchangePair(None, "all-reduce", "tp", float(size * math.prod(one.shape)))


def _tensor(w: Widths) -> Iterator[ExchangePair]:
    setting, config = w.setting, w.config
    if setting.tp == 1:
        return
    whole, latent = w.tokens * w.dim * w.size, config.latent
    inputs = [float(w.dim)]
    if latent is not None:
        inputs = [latent.q_rank or w.dim, latent.kv_rank, latent.rope_dim]
    yield from (into_heads(setting, width * w.tokens * w.size) for width in inputs)
    if config.qk_norm == "full":
        yield ExchangePair("all-reduce", "all-reduce", "tp", w.tokens * 4, 2)
    yield out_of_heads(setting, whole)
    if w.moe is not None:
        weights = w.tokens * w.moe.experts_per_token * 4
        if setting.sequence_parallel:
            yield ExchangePair("all-gather", "all-gather", "tp", whole)
        yield ExchangePair("all-reduce", "all-reduce", "tp", whole)
        yield ExchangePair(None, "all-reduce", "tp", weights)
    if w.moe is None or w.shared:
        yield into_heads(setting, whole)
        yield out_of_heads(setting, whole)
    yield from partial_gradients(parts_of(config).of_kind(experts=w.moe is not None), setting)


def _context(w: Widths) -> Iterator[ExchangePair]:
    setting, cp = w.setting, w.setting.cp
    if cp == 1:
        return
    if not setting.ulysses:
        # Keys and values travel together; their gradients follow in fp32, one step further.
        pair = 2 * w.kv * w.tokens
        yield ExchangePair("send", "send", "cp", pair * w.size, cp - 1)
        yield ExchangePair(None, "send", "cp", pair * 4, cp)
        return
    heads = round(w.config.kv_heads / setting.tp)
    times = cp // math.gcd(heads, cp)
    if times > 1 and round(w.heads) % (heads * times):
        times = round(w.heads) // heads
    token = w.tokens * w.size
    for width in (w.q, w.attended, times * w.kv, times * w.kv * w.config.value_dim / w.config.head_dim):
        yield ExchangePair("all-to-all", "all-to-all", "cp", width * token)


def _expert(w: Widths) -> Iterator[ExchangePair]:
    setting, moe = w.setting, w.moe
    if setting.ep == 1 or moe is None:
        return
    choices = w.tokens * moe.experts_per_token
    if setting.expert_capacity is None:
        # How many rows each expert gets, in 64-bit counts.
        yield ExchangePair("all-to-all", None, "ep", moe.experts * 8)
        rows = choices
    else:
        rows = moe.experts * max(math.ceil(setting.expert_capacity * choices / moe.experts), 1)
    yield ExchangePair("all-to-all", "all-to-all", "ep", rows * w.dim * w.size, 2)


def embedding_exchanges(config: ModelConfig, setting: BlockSetting) -> Iterator[ExchangePair]:
    """Yield the collectives of the embedding."""
    if setting.tp == 1:
        return
    whole = setting.tokens * config.dim * setting.itemsize
    if setting.loss_parallel:
        yield out_of_heads(setting, whole)
    elif setting.sequence_parallel:
        yield ExchangePair(None, "all-gather", "tp", whole)
    if config.positions == "learned" and setting.sequence_parallel:
        yield ExchangePair(None, "all-gather", "tp", setting.length / setting.cp * config.dim * setting.itemsize)
    yield from partial_gradients((one for one in parts_of(config).embedding if "norm" in one.name), setting)


def loss_exchanges(config: ModelConfig, setting: BlockSetting, chunk: float) -> Iterator[ExchangePair]:
    """Yield the collectives of the final norm, the output layer and the loss, whose logits come in chunks of tokens."""
    tokens = setting.tokens
    if setting.tp > 1:
        whole = tokens * config.dim * setting.itemsize
        if setting.loss_parallel:
            yield into_heads(setting, whole)
            # The maximum, then the sum of exponentials and the target's logit, of each chunk.
            full, rest = divmod(tokens, chunk)
            for size, count in ((chunk, int(full)), (rest, 1)):
                if size:
                    yield ExchangePair("all-reduce", None, "tp", 4 * size, count)
                    yield ExchangePair("all-reduce", None, "tp", 8 * size, count)
        elif setting.sequence_parallel:
            yield ExchangePair("all-gather", None, "tp", whole)
        yield from partial_gradients((one for one in parts_of(config).head if "norm" in one.name), setting)
    if setting.cp > 1:
        # The sums of a loss: four fp32 numbers and a count, and the gradient of the first.
        yield ExchangePair("all-reduce", "all-reduce", "cp", 4)
        yield ExchangePair("all-reduce", None, "cp", 4, 3)
        yield ExchangePair("all-reduce", None, "cp", 8)
