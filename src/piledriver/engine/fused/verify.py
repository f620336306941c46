"""Compare a module with its replacement on random weights and a small input: outputs and all gradients, in fp32."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.shards.local_params import plain_copy

TOLERANCE = 1e-5
"""Largest relative difference (norm of the difference over the norm) of an output or a gradient in fp32."""

Forward = Callable[[nn.Module, Tensor], Tensor]


def trial_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy in fp32 with random weights: initial ones and zeros would hide differences."""
    hidden = {name: module.__dict__.pop(name) for name in ("_engine_state",) if name in module.__dict__}
    try:
        twin = plain_copy(module)
    finally:
        module.__dict__.update(hidden)
    twin = twin.to_empty(device=device).float() if _is_meta(twin) else twin.to(device).float()
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 4
            parameter.normal_(0.0, 1.0 / math.sqrt(fan_in), generator=generator)
            parameter.requires_grad_()
    return twin


def largest_difference(twin: nn.Module, fused: Forward, width: int, device: torch.device) -> tuple[str, float]:
    """Return where a module of one tensor and its replacement differ most, and the relative difference."""
    generator = torch.Generator(device=device).manual_seed(1)
    x = torch.randn(2, 3, width, generator=generator, device=device, requires_grad=True)
    return compare(lambda: twin(x), lambda: fused(twin, x), {"input": x, **dict(twin.named_parameters())}, device)


def compare(
    original: Callable[[], Any], fused: Callable[[], Tensor], inputs: Mapping[str, Tensor], device: torch.device
) -> tuple[str, float]:
    """Return where two computations differ most (output, or the gradient of an input), and the relative difference."""
    generator = torch.Generator(device=device).manual_seed(2)
    with _exact_products(device), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        expected, found = original(), fused()
        if not isinstance(expected, Tensor) or expected.shape != found.shape or expected.dtype != found.dtype:
            return "output", math.inf
        slope = torch.randn(expected.shape, generator=generator, device=device, dtype=expected.dtype)
        theirs = torch.autograd.grad(expected, list(inputs.values()), slope, allow_unused=True)
        ours = torch.autograd.grad(found, list(inputs.values()), slope, allow_unused=True)
    worst = ("output", _distance(found, expected))
    for name, one, other in zip(inputs, ours, theirs, strict=True):
        worst = max(worst, (f"the gradient of {name}", _distance(one, other)), key=lambda pair: pair[1])
    return worst


def _distance(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    found, expected = found.detach(), expected.detach()
    apart = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
    return math.inf if math.isnan(apart) else apart


def _is_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


@contextmanager
def _exact_products(device: torch.device) -> Iterator[None]:
    """Compute fp32 products in fp32: TF32 would hide differences."""
    before = torch.get_float32_matmul_precision()
    with warnings.catch_warnings():
        # A program that turns warnings into errors would end the trial, not the difference that it looks for.
        warnings.simplefilter("ignore")
        if device.type == "cuda":
            torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.set_float32_matmul_precision(before)
