"""Linear, embedding and norm layers that compute in the dtype of their input.

Weights may stay fp32 (master weights) while activations are bf16: each layer casts its weight in its forward, which a
compiler fuses. The compute dtype is thus set in one place, where the embedding enters the residual stream. `Linear` and
`Embedding` subclass torch's, so that code that looks for `nn.Linear` (quantisation, fp8, tensor parallel, adapters)
finds them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.models.config import ModelConfig


class Linear(nn.Linear):
    """`nn.Linear` that computes in the dtype of its input and leaves initialisation to `initialise`."""

    def reset_parameters(self) -> None:
        """Do nothing: `initialise` draws every weight from its name, so that values do not depend on the layout."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Embedding(nn.Embedding):
    """`nn.Embedding` that leaves initialisation to `initialise`."""

    def reset_parameters(self) -> None:
        """Do nothing: see `Linear.reset_parameters`."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, reduced in fp32 (Zhang and Sennrich, 2019)."""

    def __init__(self, dim: int, eps: float, *, weight: bool = True) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.empty(dim)) if weight else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if self.weight is None or self.weight.dtype == x.dtype:
            return F.rms_norm(x, (self.dim,), self.weight, self.eps)
        return F.rms_norm(x.to(self.weight.dtype), (self.dim,), self.weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, reduced in fp32."""

    def __init__(self, dim: int, eps: float, *, weight: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.empty(dim)) if weight else None
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if self.weight is None or self.weight.dtype == x.dtype:
            return F.layer_norm(x, (self.dim,), self.weight, self.bias, self.eps)
        wide = x.to(self.weight.dtype)
        return F.layer_norm(wide, (self.dim,), self.weight, self.bias, self.eps).to(x.dtype)


def make_norm(config: ModelConfig) -> nn.Module:
    """Return the norm layer of the residual stream that the config asks for."""
    if config.norm == "rms":
        return RMSNorm(config.dim, config.norm_eps, weight=config.norm_weight)
    return LayerNorm(config.dim, config.norm_eps, weight=config.norm_weight, bias=config.norm_bias)


def activate(name: str, x: Tensor) -> Tensor:
    """Apply an activation function, by its name in the config."""
    if name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if name == "relu_squared":
        return F.relu(x).square()
    if name == "gelu":
        return F.gelu(x)
    return F.silu(x) if name == "silu" else F.relu(x)
