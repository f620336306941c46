"""Experts of `transformers`' mixtures: grouped products in the compute dtype, in shapes that routing does not change.

Under autocast their experts multiply fp32 weights, because torch's grouped product is not cast. Here weights are cast,
tokens are sorted by expert as in our own `MoE`, and the gate is the module's own.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piledriver.engine.fused.plain import in_autocast, why_special
from piledriver.engine.fused.recompute import recompute_in_backward
from piledriver.engine.fused.verify import TOLERANCE, compare
from piledriver.engine.torch_private import has_hooks
from piledriver.models.feed_forward.grouped_mm import grouped_mm
from piledriver.models.feed_forward.moe import sort_by_expert

OPERATION = "experts"
_FEW = 3
"""Experts that take part in the trial: all of a large mixture would not fit beside it."""


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds stacked experts as `transformers` stores them, with its marks of their layout."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    stacked = all(isinstance(weight, Tensor) and weight.ndim == 3 for weight in weights)
    return stacked and hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def match_experts(module: Any, device: torch.device) -> tuple[Any, str]:
    """Return the replacement of the experts' forward and its name; (None, why) if it does not agree."""
    special = why_special(module)
    if special is not None:
        return None, special
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return None, "its experts are not gate, up and down alone"
    if getattr(module, "_is_expert_parallel", False):
        return None, "its experts are spread over ranks"
    try:
        where, apart = _difference(module, device)
    except Exception as error:
        return None, f"its trial failed: {type(error).__name__}: {error}"
    if apart > TOLERANCE:
        return None, f"grouped products differ by {apart:.1e} in {where}"
    return experts_forward, "grouped products in the compute dtype"


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, [tokens, dim]."""
    if isinstance(module.gate_up_proj, DTensor) or has_hooks(module):
        return type(module).forward(module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    x = in_autocast(hidden_states)
    slots, ends, size = sort_by_expert(top_k_index, module.num_experts)
    rows = recompute_in_backward(_to_experts, x, slots, size)
    # Before the second product: its backward then needs neither the outputs of experts nor a pass over them.
    factors = _to_experts(top_k_weights.to(x.dtype).view(-1, 1), slots, size)
    done = FromExperts.apply(apply_stacked(module, rows, ends, factors), slots)  # type: ignore[no-untyped-call]
    return done.view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)  # type: ignore[no-any-return]


def _to_experts(tokens: Tensor, slots: Tensor, size: int) -> Tensor:
    return ToExperts.apply(tokens, slots, size)  # type: ignore[no-any-return, no-untyped-call]


class ToExperts(torch.autograd.Function):
    """Rows of [tokens, dim] in the order of experts, zero between them; `slots` are the rows of each token's choices.

    Both passes read by index and write in order. torch's own backward of an index adds atomically.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.tokens = tokens.shape[0]
        return _rows_at(tokens, slots, size, slots.shape[0] // tokens.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return gradient[slots].view(ctx.tokens, -1, gradient.shape[-1]).sum(dim=1), None, None


class FromExperts(torch.autograd.Function):
    """The rows of each token's choices, [tokens * choices, dim]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.size = rows.shape[0]
        return rows[slots]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        return _rows_at(gradient, slots, ctx.size, 1), None


def _rows_at(source: Tensor, slots: Tensor, size: int, choices: int) -> Tensor:
    """Return [size, dim] with source[i // choices] at slots[i], and zeros elsewhere."""
    numbers = torch.arange(slots.shape[0], device=slots.device) // choices
    origin = torch.full((size,), -1, dtype=slots.dtype, device=slots.device).scatter(0, slots, numbers)
    return torch.where((origin >= 0).unsqueeze(1), source[origin.clamp(min=0)], 0)


def apply_stacked(module: Any, rows: Tensor, ends: Tensor, factors: Tensor | None = None) -> Tensor:
    """Apply the experts to [rows, dim] sorted by expert; expert e owns the rows from ends[e - 1] to ends[e].

    `factors` ([rows, 1]) multiply the outputs.
    """
    hidden = grouped_mm(rows, _matrices(module, module.gate_up_proj, rows.dtype), ends)
    expert = _expert_of_row(rows, ends) if module.has_bias else None
    if expert is not None:
        hidden = hidden + module.gate_up_proj_bias.to(rows.dtype)[expert]
    inner = recompute_in_backward(_gated, module, hidden, factors)
    out: Tensor = grouped_mm(inner, _matrices(module, module.down_proj, rows.dtype), ends)
    if expert is not None:
        bias = module.down_proj_bias.to(rows.dtype)[expert]
        out = out + (bias if factors is None else bias * factors)
    return out


def _gated(module: Any, hidden: Tensor, factors: Tensor | None) -> Tensor:
    inner: Tensor = module._apply_gate(hidden)
    return inner if factors is None else inner * factors


def _expert_of_row(rows: Tensor, ends: Tensor) -> Tensor:
    # Rows after the last end belong to no expert; what they compute is never read.
    expert = torch.searchsorted(ends, torch.arange(rows.shape[0], device=ends.device), right=True)
    return expert.clamp(max=ends.shape[0] - 1)


def _matrices(module: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [experts, in, out] in the compute dtype."""
    weight = weight.to(dtype)
    return weight if module.is_transposed else weight.transpose(-2, -1)


def _difference(module: Any, device: torch.device) -> tuple[str, float]:
    """Return where a few experts and their replacement differ most, in fp32."""
    few = min(_FEW, module.num_experts)
    generator = torch.Generator(device=device).manual_seed(0)
    twin = copy.copy(module)
    twin._parameters = {
        name: nn.Parameter(
            torch.randn((few, *weight.shape[1:]), generator=generator, device=device) / math.sqrt(weight.shape[-1])
        )
        for name, weight in module.named_parameters(recurse=False)
    }
    twin.num_experts = few
    width = module.gate_up_proj.shape[1 if module.is_transposed else 2]
    x = torch.randn(5, width, generator=generator, device=device, requires_grad=True)
    # The last expert gets no token.
    index = torch.tensor(
        [[0, min(1, few - 1)], [min(1, few - 1), 0], [0, 0], [0, 0], [min(1, few - 1), 0]], device=device
    )
    weights = torch.rand(index.shape, generator=generator, device=device, requires_grad=True)
    # The class's own loop over experts: what other implementations are measured against.
    original = getattr(type(module).forward, "__wrapped__", type(module).forward)
    inputs = {"input": x, "routing weights": weights, **dict(twin.named_parameters(recurse=False))}
    return compare(
        lambda: original(twin, x, index, weights), lambda: experts_forward(twin, x, index, weights), inputs, device
    )
