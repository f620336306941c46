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
    copies = x.repeat_interleave(top_k_index.shape[-1], dim=0)
    rows = x.new_zeros(size, x.shape[-1]).index_copy(0, slots, copies)
    done = apply_stacked(module, rows, ends)[slots]
    done = done.view(*top_k_index.shape, -1) * top_k_weights.to(done.dtype).unsqueeze(-1)
    return done.sum(dim=1).to(hidden_states.dtype)


def apply_stacked(module: Any, rows: Tensor, ends: Tensor) -> Tensor:
    """Apply the experts to [rows, dim] sorted by expert; expert e owns the rows from ends[e - 1] to ends[e]."""
    hidden = grouped_mm(rows, _matrices(module, module.gate_up_proj, rows.dtype), ends)
    if not module.has_bias:
        return grouped_mm(module._apply_gate(hidden), _matrices(module, module.down_proj, rows.dtype), ends)
    # Rows after the last end belong to no expert; what they compute is never read.
    expert = torch.searchsorted(ends, torch.arange(rows.shape[0], device=ends.device), right=True)
    expert = expert.clamp(max=ends.shape[0] - 1)
    hidden = module._apply_gate(hidden + module.gate_up_proj_bias.to(rows.dtype)[expert])
    out: Tensor = grouped_mm(hidden, _matrices(module, module.down_proj, rows.dtype), ends)
    out = out + module.down_proj_bias.to(rows.dtype)[expert]
    return out


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
