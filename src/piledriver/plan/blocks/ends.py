"""The cost of the ends of a model: the embedding, the output layer and the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

from piledriver.kernels.cross_entropy import default_chunk_tokens
from piledriver.models.config import ModelConfig
from piledriver.plan.blocks.exchanges import backward_of, embedding_exchanges, forward_of, loss_exchanges
from piledriver.plan.blocks.operators import Exchange, Kept, Operator, matmul, moved
from piledriver.plan.blocks.per_model import cached_per_model
from piledriver.plan.blocks.setting import BlockSetting


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCost:
    """The cost of an end for one micro-batch on one rank."""

    operators: tuple[Operator, ...]
    """Forward and backward together."""
    kept: tuple[Kept, ...] = ()
    """Alive from the forward to the backward."""
    forward_peak: tuple[Kept, ...] = ()
    """Alive while the forward runs, besides `kept`."""
    backward_peak: tuple[Kept, ...] = ()
    """Alive while the backward of this end runs, besides `kept`."""
    exchanges: tuple[Exchange, ...] = ()
    stranded: float = 0.0
    """Bytes freed before the peak, in segments that the peak's tensors do not fit."""


@cached_per_model
def loss_cost(config: ModelConfig, setting: BlockSetting, weight_size: int = 4, kind: str = "cuda") -> EndCost:
    """Return the cost of the final norm, the output layer and the loss; `weight_size` is that of the weight."""
    tokens, size = setting.tokens, setting.itemsize
    tp = setting.tp if setting.loss_parallel else 1
    rows, dim = config.vocab_size / tp, config.dim
    product = matmul("output layer", tokens, rows, dim, size)
    operators = [
        moved("final norm", 6 * tokens * dim * size),
        product,
        matmul("output layer, input gradient", tokens, dim, rows, size),
        matmul("output layer, weight gradient", rows, dim, tokens, size),
        moved("loss", _loss_bytes(setting) * tokens * rows),
    ]
    whole = tokens * dim * size
    hidden = Kept("input of the output layer", whole)
    # The final norm runs outside the blocks: eager, with its input cast to the dtype of its weight.
    norm = Kept("input of the final norm", tokens * dim * (max(size, weight_size) if config.norm_weight else size))
    own = setting.traits.loss_chunk or default_chunk_tokens(round(rows), kind, dim)
    chunk = min(tokens, own) if setting.traits.chunked_loss else tokens
    if setting.traits.chunked_loss and not setting.traits.copying_loss:
        chunk = tokens / math.ceil(tokens / own)  # of nearly equal size
    pairs = list(loss_exchanges(config, setting, chunk))
    exchanges = (*forward_of(pairs), *backward_of(pairs))
    if not setting.traits.chunked_loss:
        return _whole_logits(setting, tokens * rows, operators, (norm, hidden), exchanges)
    weight = rows * dim
    cast = 0.0 if weight_size == size else weight * size
    operators.append(moved("weight gradient of chunks", 2 * weight * weight_size * max(1.0, tokens / chunk)))
    operators.append(moved("scale of the loss gradients", 3 * weight * weight_size + 4 * whole))
    return EndCost(
        operators=tuple(operators),
        kept=(
            norm,
            Kept("hidden gradient of the loss", whole),
            Kept("weight gradient of the loss", weight * weight_size),
        ),
        forward_peak=(
            Kept(
                "logits of a chunk", min(setting.traits.loss_buffers, math.ceil(tokens / chunk)) * chunk * rows * size
            ),
            Kept("output weight, cast", cast),
            hidden,
        ),
        backward_peak=(
            Kept("copies of the weight gradient", 2 * weight * weight_size * setting.traits.copying_loss),
            Kept("scaled hidden gradient", whole * (1 + 4 / size)),
        ),
        exchanges=exchanges,
    )


def _loss_bytes(setting: BlockSetting) -> float:
    """Return the traffic of one logit besides the output layer's products, forward and backward.

    A loss on whole logits runs in fp32. Compiled, it reads them twice and writes their gradient; eager, it casts them
    there and back with a log-softmax and its gradient between; over sharded rows maximum, difference, exponential, sum
    and quotient are kernels of their own.
    """
    traits = setting.traits
    if traits.chunked_loss:
        return 3.0 * setting.itemsize
    if setting.compiled and traits.compiled_loss:
        return 16.0
    return 46.0 if setting.loss_parallel or traits.master_copy else 34.0


def _whole_logits(
    setting: BlockSetting,
    logits: float,
    operators: list[Operator],
    kept: tuple[Kept, ...],
    exchanges: tuple[Exchange, ...],
) -> EndCost:
    """A loss on the logits of the whole micro-batch, in fp32."""
    size = setting.itemsize
    if setting.compiled and setting.traits.compiled_loss:
        # A compiled loss keeps no fp32 copy.
        return EndCost(
            operators=tuple(operators),
            kept=(*kept, Kept("logits", logits * size)),
            forward_peak=(Kept("fp32 logits", logits * 4),),
            backward_peak=(Kept("fp32 logits and their gradient", logits * 4),),
            exchanges=exchanges,
        )
    # Forward: the logits, their cast and its log-softmax; over sharded rows one exponential more. Backward: the
    # log-softmax and the gradients of loss and softmax; over sharded rows the exponential and a sum besides.
    sharded = setting.loss_parallel
    return EndCost(
        operators=tuple(operators),
        kept=kept,
        forward_peak=(Kept("logits in two dtypes and their softmax", logits * (size + (12 if sharded else 8))),),
        backward_peak=(Kept("softmax of the logits and gradients", logits * (16 if sharded else 12)),),
        exchanges=exchanges,
        stranded=logits * size,
    )


@cached_per_model
def embedding_cost(config: ModelConfig, setting: BlockSetting, weight_size: int = 4) -> EndCost:
    """Return the cost of the embedding: a look-up, and a dense gradient of the table."""
    tokens, size = setting.tokens, setting.itemsize
    tp = setting.tp if setting.loss_parallel else 1
    table = config.vocab_size * config.dim / tp * weight_size
    whole = tokens * config.dim * size
    operators = (moved("embedding", 3 * whole), moved("embedding gradient", 2 * table + 3 * whole))
    pairs = list(embedding_exchanges(config, setting))
    exchanges = (*forward_of(pairs), *backward_of(pairs))
    return EndCost(
        operators=operators,
        kept=(Kept("tokens and targets", tokens * 16),),
        backward_peak=(Kept("embedding gradient", table),),
        exchanges=exchanges,
    )
