"""RMSNorm and LayerNorm of any class, recognised by what they compute.

A norm reads fp32 weights and 16-bit activations, reduces in fp32 and returns the dtype of its input: the residual
stream stays in 16 bits. The compiler fuses the formula with its neighbours; without it torch's fused kernel runs.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.engine.fused.plain import takes_one_tensor, why_more_arguments, why_special
from piledriver.engine.fused.recompute import recompute_in_backward
from piledriver.engine.fused.verify import TOLERANCE, Forward, largest_difference, trial_copy

OPERATION = "norm"
_EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps", "_eps")
_FORMULAS = {
    "rms": "RMSNorm",
    "rms+1": "RMSNorm with 1 + weight",
    "layer": "LayerNorm",
    "layer+1": "LayerNorm with 1 + weight",
}


def is_norm(module: nn.Module) -> bool:
    """Return whether this may be a norm over the last dim: a vector of weights, an epsilon, nothing inside."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    if not {"weight"} <= names <= {"weight", "bias"} or any(True for _ in module.children()):
        return False
    weight = cast(Tensor, module.weight)
    inner = any(True for _ in module.buffers())
    return weight.ndim == 1 and _eps_of(module) is not None and not inner and takes_one_tensor(module)


def match_norm(module: nn.Module, device: torch.device, *, recompute: bool) -> tuple[Any, str]:
    """Return the replacement of a norm's forward and its name; (None, why) if no formula agrees."""
    special = why_special(module, replicas=True) or why_more_arguments(module)
    if special is not None:
        return None, special
    twin = trial_copy(module, device)
    has_bias = getattr(module, "bias", None) is not None
    seen: list[str] = []
    for formula in ("layer", "layer+1") if has_bias else _FORMULAS:
        forward = norm_forward(formula, cast(float, _eps_of(module)), recompute)
        try:
            where, apart = largest_difference(twin, forward, cast(Tensor, module.weight).shape[0], device)
        except Exception as error:
            return None, f"its trial failed: {type(error).__name__}: {error}"
        if apart <= TOLERANCE:
            return forward, _FORMULAS[formula]
        seen.append(f"{_FORMULAS[formula]} differs by {apart:.1e} in {where}")
    return None, "; ".join(seen)


@functools.cache
def norm_forward(formula: str, eps: float, recompute: bool) -> Forward:
    """Return the forward of a norm: one function for all norms alike, so that compiled blocks share a graph."""

    layer = formula.startswith("layer")

    def compute(module: Any, x: Tensor) -> Tensor:
        weight, bias = module.weight, module.bias if layer and hasattr(module, "bias") else None
        if formula.endswith("+1"):
            weight, bias = 1.0 + weight.float(), None if bias is None else bias.float()
        wide = x if weight.dtype == x.dtype else x.to(weight.dtype)
        if layer:
            return F.layer_norm(wide, weight.shape, weight, bias, eps).to(x.dtype)
        return F.rms_norm(wide, weight.shape, weight, eps).to(x.dtype)

    if not recompute:
        return compute

    def compute_again(module: Any, x: Tensor) -> Tensor:
        return recompute_in_backward(compute, module, x)

    return compute_again


def _eps_of(module: nn.Module) -> float | None:
    found = next((getattr(module, name) for name in _EPS if hasattr(module, name)), None)
    return float(found) if isinstance(found, float) and not isinstance(found, bool) else None
