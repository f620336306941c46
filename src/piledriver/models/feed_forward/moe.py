"""Dropless mixture of experts: each token is routed to its top-k experts, computed as one grouped matrix product.

Shapes are static (tokens are sorted by expert into a buffer padded for each group's alignment), so that nothing
synchronises with the host and the whole block compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from piledriver.models.config import ModelConfig, MoEConfig
from piledriver.models.feed_forward.grouped_mm import ROW_ALIGNMENT, grouped_mm
from piledriver.models.feed_forward.mlp import gate
from piledriver.models.layers import Linear, activate


class Routing(NamedTuple):
    """Routing of each token to its experts."""

    experts: Tensor
    """[tokens, k]: indices of the chosen experts."""
    weights: Tensor
    """[tokens, k]: weight of each chosen expert."""
    balance: Tensor
    """Scalar load-balance loss: 1 if all experts get the same share of tokens, more otherwise."""


class Router(nn.Module):
    """Top-k router: scores every expert for every token and keeps the best k."""

    def __init__(self, dim: int, settings: MoEConfig) -> None:
        super().__init__()
        self.settings = settings
        self.score = Linear(dim, settings.experts, bias=False)
        # Where a batch is spread over ranks, the engine replaces this by a mean over them.
        self.average: Callable[[Tensor], Tensor] = _identity

    def forward(self, x: Tensor) -> Routing:
        """Return the routing of [tokens, dim]; softmax and balance are computed in fp32."""
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
        """Apply the experts to [rows, dim] sorted by expert; expert e owns the rows from ends[e - 1] to ends[e]."""
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
        # Expert parallelism replaces this by an exchange of tokens between ranks.
        self.dispatch: Callable[[Experts, Tensor, Routing], Tensor] = dispatch_tokens

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output for [batch, time, dim], and the load-balance loss."""
        tokens = x.flatten(0, 1)
        routing = self.router(tokens)
        return self.dispatch(self.experts, tokens, routing).view_as(x), routing.balance


def dispatch_tokens(experts: Experts, tokens: Tensor, routing: Routing) -> Tensor:
    """Apply to each token its experts: [tokens, dim] to the weighted sum of their outputs."""
    slots, ends, size = sort_by_expert(routing.experts, experts.count)
    copies = tokens.repeat_interleave(routing.experts.shape[1], dim=0)
    buffer = tokens.new_zeros(size, tokens.shape[1]).index_copy(0, slots, copies)
    return combine(experts(buffer, ends)[slots], routing)


def combine(done: Tensor, routing: Routing) -> Tensor:
    """Return the weighted sum of expert outputs [tokens * k, dim] over the k choices of each token."""
    done = done.view(*routing.experts.shape, -1)
    return (done * routing.weights.to(done.dtype).unsqueeze(-1)).sum(dim=1)


def _identity(x: Tensor) -> Tensor:
    return x


def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, int]:
    """Sort (token, choice) pairs by expert.

    Returns the buffer row of each pair, the end of each expert's rows, and the number of rows.

    Padding rows that align a group are zero. The last expert also owns the remaining padding, so that every row is
    computed.
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
