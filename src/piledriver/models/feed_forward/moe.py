"""A mixture of experts: each token visits its top-k experts, computed as one grouped matrix product, dropping nothing.

Every shape is static (tokens are sorted by expert into a buffer with room for each group's alignment), so no number has
to travel to the host and the whole block compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from piledriver.models.config import ModelConfig, MoEConfig
from piledriver.models.feed_forward.grouped import ROW_ALIGNMENT, grouped_mm
from piledriver.models.feed_forward.mlp import gate
from piledriver.models.layers import Linear, activate


class Routing(NamedTuple):
    """Where each token goes."""

    experts: Tensor
    """[tokens, k]: the chosen experts."""
    weights: Tensor
    """[tokens, k]: how much each counts."""
    balance: Tensor
    """Scalar: 1 where all experts get the same share, more where they do not."""


class Router(nn.Module):
    """Scores every expert for every token and keeps the best k."""

    def __init__(self, dim: int, settings: MoEConfig) -> None:
        super().__init__()
        self.settings = settings
        self.score = Linear(dim, settings.experts, bias=False)
        # Where the tokens of a batch lie on several devices, this makes their means those of the whole batch.
        self.average: Callable[[Tensor], Tensor] = _as_it_is

    def forward(self, x: Tensor) -> Routing:
        """[tokens, dim] to a routing; softmax and balance in fp32."""
        experts = self.settings.experts
        probabilities = self.score(x).float().softmax(dim=-1)
        weights, chosen = probabilities.topk(self.settings.experts_per_token, dim=-1)
        if self.settings.normalise_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        share = torch.zeros(experts, device=x.device).scatter_add(
            0, chosen.flatten(), torch.ones_like(weights).flatten()
        )
        share, probability = self.average(share / chosen.numel()), self.average(probabilities.mean(dim=0))
        balance = experts * (share * probability).sum()
        return Routing(chosen, weights, balance)


class Experts(nn.Module):
    """The weights of all experts, stacked."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.count = config.moe.experts
        self.activation, self.block, self.gated = config.activation, config.gate_block, config.mlp == "gated"
        rows = 2 * config.mlp_dim if self.gated else config.mlp_dim
        self.gate_up = nn.Parameter(torch.empty(config.moe.experts, rows, config.dim))
        self.down = nn.Parameter(torch.empty(config.moe.experts, config.dim, config.mlp_dim))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """[rows, dim] sorted by expert to the same; expert e owns the rows before ends[e] and after ends[e - 1]."""
        hidden = grouped_mm(rows, self.gate_up.to(rows.dtype).transpose(-2, -1), ends)
        hidden = gate(hidden, self.activation, self.block) if self.gated else activate(self.activation, hidden)
        return grouped_mm(hidden, self.down.to(rows.dtype).transpose(-2, -1), ends)


class MoE(nn.Module):
    """Router and experts in place of an MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.router = Router(config.dim, config.moe)
        self.experts = Experts(config)
        # Where experts lie on several devices, this carries the tokens there and back.
        self.visit: Callable[[Experts, Tensor, Routing], Tensor] = visit

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, time, dim] to the same, and how uneven the load was."""
        tokens = x.flatten(0, 1)
        routing = self.router(tokens)
        return self.visit(self.experts, tokens, routing).view_as(x), routing.balance


def visit(experts: Experts, tokens: Tensor, routing: Routing) -> Tensor:
    """Every token through its experts: [tokens, dim] to the weighted sum of what they made of it."""
    slots, ends, size = place(routing.experts, experts.count)
    copies = tokens.repeat_interleave(routing.experts.shape[1], dim=0)
    buffer = tokens.new_zeros(size, tokens.shape[1]).index_copy(0, slots, copies)
    return mix(experts(buffer, ends)[slots], routing)


def mix(done: Tensor, routing: Routing) -> Tensor:
    """The weighted sum over the choices of each token of [tokens * k, dim]."""
    done = done.view(*routing.experts.shape, -1)
    return (done * routing.weights.to(done.dtype).unsqueeze(-1)).sum(dim=1)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def place(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, int]:
    """Sort (token, choice) pairs by expert: the row of each in the buffer, the end of each expert's rows, all rows.

    Rows that only align a group are zero; the last expert also gets what is left, so that every row is computed.
    """
    flat = chosen.flatten()
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))
    aligned = (counts + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
    begins = aligned.cumsum(0) - aligned
    order = flat.argsort(stable=True)
    rank_in_group = torch.arange(flat.numel(), device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
    slots = torch.empty_like(flat).scatter(0, order, begins[flat[order]] + rank_in_group)
    size = (flat.numel() + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT + experts * ROW_ALIGNMENT
    ends = aligned.cumsum(0)
    ends = torch.cat((ends[:-1], ends.new_full((1,), size)))
    return slots, ends.int(), size
