"""The forward pass of a step: the trained module itself, with a paged cache in place of its attention mask.

`ModuleForward` runs the tokens of a step at once. `TiledForward` runs them in tiles of one fixed shape: where the order
of a product's sums depends on its shape (torch's products on any device), this makes every token's bits independent of
the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.paged_attention import PagedBatch
from piledriver.models import Transformer
from piledriver.models.feed_forward.moe import Experts, MoE, Routing
from piledriver.serve.execution.pages import PagedCache

TILE = 16
"""Rows of every product in deterministic mode. On a CPU, products of fewer rows sum in another order."""


class Forward(Protocol):
    """Computes hidden states of a step's tokens, and logits of some of them."""

    captured: ClassVar[bool]
    """Whether a CUDA graph can hold it: all its inputs are tensors on the device."""

    def hidden(self, tokens: Tensor, positions: Tensor, batch: PagedBatch, rows: Tensor | None = None) -> Tensor:
        """Return [tokens, dim] for flattened tokens at these positions of their sequences, or of `rows` of them."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab]."""


class ModuleForward:
    """The module's own forward over all tokens at once."""

    captured: ClassVar[bool] = True

    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self.model, self.cache = model, cache

    def hidden(self, tokens: Tensor, positions: Tensor, batch: PagedBatch, rows: Tensor | None = None) -> Tensor:
        """See `Forward`."""
        self.cache.batch = batch
        found = self.model.run(tokens[None], cache=self.cache, positions=positions[None])[0][0]
        return found if rows is None else found[rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Forward`."""
        return self.model.logits(hidden)


class TiledForward:
    """The module's forward over `TILE` tokens at a time, in order: later tokens find earlier ones in the cache."""

    captured: ClassVar[bool] = False

    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self.model, self.cache = model, cache

    def hidden(self, tokens: Tensor, positions: Tensor, batch: PagedBatch, rows: Tensor | None = None) -> Tensor:
        """See `Forward`."""
        count, missing = len(tokens), -len(tokens) % TILE
        scratch = self.cache.scratch_block * self.cache.block_size
        tokens, positions = F.pad(tokens, (0, missing)), F.pad(positions, (0, missing))
        slots = F.pad(batch.slots, (0, missing), value=scratch)
        parts = []
        with dense_experts(self.model):
            for begin in range(0, count, TILE):
                self.cache.batch = _window(batch, begin, slots[begin : begin + TILE])
                tile = slice(begin, begin + TILE)
                # Memory of its own: kernels may choose by alignment.
                here, places = tokens[tile].clone()[None], positions[tile].clone()[None]
                parts.append(self.model.run(here, cache=self.cache, positions=places)[0][0])
        return torch.cat(parts)[:count] if rows is None else torch.cat(parts)[rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Forward`."""
        padded = F.pad(hidden, (0, 0, 0, -len(hidden) % TILE))
        return torch.cat([self.model.logits(tile.clone()) for tile in torch.split(padded, TILE)])[: len(hidden)]


def _window(batch: PagedBatch, begin: int, slots: Tensor) -> PagedBatch:
    """Return the part of a batch that tokens `begin` to `begin` + `TILE` make up."""
    rows, spans, start = [], [], 0
    for row, (count, context) in enumerate(batch.spans):
        first, last = max(start, begin), min(start + count, begin + len(slots))
        if first < last:
            rows.append(row)
            spans.append((last - first, context - (start + count - last)))
        start += count
    counts, contexts = zip(*spans, strict=True)
    starts = [0, *itertools.accumulate(counts)]
    device = batch.tables.device
    return batch._replace(
        tables=batch.tables[rows],
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        contexts=torch.tensor(contexts, dtype=torch.int32, device=device),
        slots=slots,
        max_new=max(counts),
        spans=tuple(spans),
    )


@contextmanager
def dense_experts(model: Transformer) -> Iterator[None]:
    """Within it, mixtures of experts compute every expert for every token."""
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    usual = [moe.dispatch for moe in mixtures]
    if mixtures:
        from piledriver.engine.tensor_parallel.transformer import ExpertTensorParallel
    for moe in mixtures:
        over = moe.dispatch.group if isinstance(moe.dispatch, ExpertTensorParallel) else None
        moe.dispatch = dispatch_densely if over is None else ExpertTensorParallel(dispatch_densely, over)
    try:
        yield
    finally:
        for moe, dispatch in zip(mixtures, usual, strict=True):
            moe.dispatch = dispatch


def dispatch_densely(experts: Experts, tokens: Tensor, routing: Routing) -> Tensor:
    """Apply every expert to every token and keep what was routed: products of one shape, whatever the routing."""
    from piledriver.engine.shards.local_params import part

    kept = tokens.new_zeros(tokens.shape[0], experts.count)
    kept.scatter_(1, routing.experts, routing.weights.to(tokens.dtype))
    out = torch.zeros_like(tokens)
    gate_up, down = part(experts.gate_up).to(tokens.dtype), part(experts.down).to(tokens.dtype)
    biases = None if experts.gate_up_bias is None else part(experts.gate_up_bias).to(tokens.dtype)
    for expert in range(experts.count):  # in this order, whatever was chosen
        hidden = experts.activated(F.linear(tokens, gate_up[expert], None if biases is None else biases[expert]))
        out = out + F.linear(hidden, down[expert]) * kept[:, expert, None]
    return out
