"""The cost of a module: FLOPs per token (time of a stage) and parameters (its memory)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from piledriver.models import Transformer
from piledriver.models.block import Block
from piledriver.models.model_size import mean_context

# Weight of memory beside time: of two equally fast splits, the one that spreads the parameters is better.
MEMORY_SHARE = 0.1


@dataclass(frozen=True)
class Cost:
    """Forward FLOPs per token, and parameters."""

    flops: float
    parameters: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.parameters + other.parameters)


def weights(costs: Sequence[Cost]) -> list[float]:
    """Return one number for each: its fraction of the FLOPs, and a little of its fraction of the parameters."""
    flops = sum(cost.flops for cost in costs) or 1.0
    parameters = sum(cost.parameters for cost in costs) or 1
    return [(1 - MEMORY_SHARE) * cost.flops / flops + MEMORY_SHARE * cost.parameters / parameters for cost in costs]


def cost_of(module: nn.Module, sequence_length: int) -> Cost:
    """Return the cost of a module: two FLOPs per weight, attention by its context; embeddings take no FLOPs.

    >>> cost_of(nn.Sequential(nn.Linear(4, 8, bias=False), nn.Embedding(9, 4)), 16)
    Cost(flops=64.0, parameters=68)
    """
    parameters = sum(parameter.numel() for parameter in module.parameters())
    flops = 0.0
    for part in module.modules():
        if isinstance(part, Block):
            config = part.attention.config
            context = mean_context(sequence_length, part.window)
            flops += 2.0 * config.heads * (config.head_dim + config.value_dim) * context
            flops += _flops_per_token(part)
        elif not isinstance(part, nn.Embedding) and not isinstance(module, Block):
            flops += sum(2.0 * p.numel() for p in part.parameters(recurse=False) if p.dim() > 1)
    return Cost(flops, parameters)


def output_cost(model: Transformer) -> Cost:
    """Return the cost of the output layer, also if it is the tied embedding."""
    size = model.config.vocab_size * model.config.dim
    return Cost(2.0 * size, size)


def _flops_per_token(block: Block) -> float:
    """Return two FLOPs per weight, of experts only those that a token is routed to."""
    settings = block.attention.config.moe
    met = 0.0
    for name, parameter in block.named_parameters():
        share = settings.experts_per_token / settings.experts if settings and ".experts." in name else 1.0
        met += 2.0 * share * parameter.numel() * (parameter.dim() > 1)
    return met
