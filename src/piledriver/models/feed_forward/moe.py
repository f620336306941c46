"""Dropless mixture of experts: each token is routed to its top-k experts, computed as one grouped matrix product.

Shapes are static (tokens are sorted by expert into a buffer padded for each group's alignment), so that nothing
synchronises with the host and the whole block compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from piledriver.models.config import ModelConfig, MoEConfig, gate_block_of
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

    fp32_parameters = ("correction_bias",)
    """Parameters that stay in fp32 where the other weights are bf16."""

    def __init__(self, dim: int, settings: MoEConfig) -> None:
        super().__init__()
        self.settings = settings
        self.score = Linear(dim, settings.experts, bias=settings.router_bias)
        frozen = nn.Parameter(torch.empty(settings.experts), requires_grad=False)
        self.correction_bias = frozen if settings.correction_bias else None
        # Where a batch is spread over ranks, the engine replaces this by a mean over them.
        self.average: Callable[[Tensor], Tensor] = _identity

    def forward(self, x: Tensor) -> Routing:
        """Return the routing of [tokens, dim]; scores and balance are computed in fp32."""
        settings = self.settings
        logits = self.score(x).float()
        scores = logits.softmax(dim=-1) if settings.scores == "softmax" else logits.sigmoid()
        chosen = self._candidates(scores).topk(settings.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if settings.normalise_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if settings.weight_scale != 1.0:
            weights = weights * settings.weight_scale
        return Routing(chosen, weights, self._balance(scores, chosen))

    def _candidates(self, scores: Tensor) -> Tensor:
        """Return the scores by which experts are chosen: with the correction bias, -inf outside the best groups."""
        settings = self.settings
        if self.correction_bias is not None:
            scores = scores + self.correction_bias
        if settings.groups == 1:
            return scores
        grouped = torch.unflatten(scores, -1, (settings.groups, -1))
        best = grouped.amax(dim=-1) if settings.group_score == "max" else grouped.topk(2, dim=-1).values.sum(dim=-1)
        kept = best.topk(settings.groups_per_token, dim=-1).indices
        outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
        return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)

    def _balance(self, scores: Tensor, chosen: Tensor) -> Tensor:
        experts = self.settings.experts
        if self.settings.scores == "sigmoid":
            scores = scores / scores.sum(dim=-1, keepdim=True)
        share = torch.zeros(experts, device=scores.device).scatter_add(
            0, chosen.flatten(), torch.ones_like(chosen, dtype=torch.float32).flatten()
        )
        share, probability = self.average(share / chosen.numel()), self.average(scores.mean(dim=0))
        return experts * (share * probability).sum()


class Experts(nn.Module):
    """The weights of all experts, stacked."""

    gate_up_bias: nn.Parameter | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.count, width = config.moe.experts, config.moe.expert_dim
        self.activation, self.limit, self.gated = config.activation, config.gate_limit, config.mlp == "gated"
        self.block = gate_block_of(width)
        rows = 2 * width if self.gated else width
        self.gate_up = nn.Parameter(torch.empty(config.moe.experts, rows, config.dim))
        self.down = nn.Parameter(torch.empty(config.moe.experts, config.dim, width))
        bias = nn.Parameter(torch.empty(config.moe.experts, rows)) if config.mlp_bias else None
        self.register_parameter("gate_up_bias", bias)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Apply the experts to [rows, dim] sorted by expert; expert e owns the rows from ends[e - 1] to ends[e]."""
        return grouped_mm(self.hidden(rows, ends), self.down.to(rows.dtype).transpose(-2, -1), ends)

    def hidden(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the input of the second product for [rows, dim] sorted by expert."""
        hidden = grouped_mm(rows, self.gate_up.to(rows.dtype).transpose(-2, -1), ends)
        if self.gate_up_bias is not None:
            expert = torch.searchsorted(ends, torch.arange(rows.shape[0], device=ends.device), right=True)
            # Rows after the last end belong to no expert; what they compute is never read.
            hidden = hidden + self.gate_up_bias.to(rows.dtype)[expert.clamp(max=ends.shape[0] - 1)]
        return self.activated(hidden)

    def activated(self, hidden: Tensor) -> Tensor:
        """Return what the second product of an expert reads, given the output of its first."""
        if self.gated:
            return gate(hidden, self.activation, self.block, self.limit)
        return activate(self.activation, hidden)


class MoE(nn.Module):
    """Router and experts in place of an MLP."""

    down_bias: nn.Parameter | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.router = Router(config.dim, config.moe)
        self.experts = Experts(config)
        # Not among the experts: it is added once, after what tensor parallelism sums and expert parallelism sends.
        bias = nn.Parameter(torch.empty(config.moe.experts, config.dim)) if config.mlp_bias else None
        self.register_parameter("down_bias", bias)
        # Expert parallelism replaces this by an exchange of tokens between ranks.
        self.dispatch: Callable[[Experts, Tensor, Routing], Tensor] = dispatch_tokens

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output for [batch, time, dim], and the load-balance loss."""
        tokens = x.flatten(0, 1)
        routing = self.router(tokens)
        weights = routing.weights
        if self.router.settings.weigh_inputs:
            tokens, routing = tokens * weights.to(tokens.dtype), routing._replace(weights=torch.ones_like(weights))
        out = self.dispatch(self.experts, tokens, routing)
        if self.down_bias is not None:
            out = out + combine(self.down_bias.to(out.dtype)[routing.experts.flatten()], routing)
        return out.view_as(x), routing.balance


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
