"""Linear, embedding and norm layers that compute in the dtype of their input.

Weights may stay fp32 (master weights) while activations are bf16: each layer casts its weight in its forward, which a
compiler fuses. The compute dtype is thus set in one place, where the embedding enters the residual stream. `Linear` and
`Embedding` subclass torch's, so that code that looks for `nn.Linear` (quantisation, fp8, tensor parallel, adapters)
finds them.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.kernels.linear.few_rows import few_rows_linear
from piledriver.models.config import ModelConfig


class Linear(nn.Linear):
    """`nn.Linear` that computes in the dtype of its input and leaves initialisation to `initialise`."""

    def reset_parameters(self) -> None:
        """Do nothing: `initialise` draws every weight from its name, so that values do not depend on the layout."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return few_rows_linear(x, self.weight.to(x.dtype), bias)


class Embedding(nn.Embedding):
    """`nn.Embedding` that leaves initialisation to `initialise`."""

    def reset_parameters(self) -> None:
        """Do nothing: see `Linear.reset_parameters`."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, reduced in fp32 (Zhang and Sennrich, 2019).

    The weight may have more dimensions than the last one: [heads, head_dim] normalises each head with its own weights.
    With `offset` it is one plus the parameter.
    """

    def __init__(self, shape: int | tuple[int, ...], eps: float, *, weight: bool = True, offset: bool = False) -> None:
        super().__init__()
        self.dim, self.eps, self.offset = shape if isinstance(shape, int) else shape[-1], eps, offset
        self.weight = nn.Parameter(torch.empty(shape)) if weight else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        weight = _scale_of(self.weight, self.offset)
        if weight is not None and weight.dim() > 1:
            return (F.rms_norm(x.to(weight.dtype), (self.dim,), None, self.eps) * weight).to(x.dtype)
        if weight is None or weight.dtype == x.dtype:
            return F.rms_norm(x, (self.dim,), weight, self.eps)
        return F.rms_norm(x.to(weight.dtype), (self.dim,), weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, reduced in fp32; weights as of `RMSNorm`."""

    def __init__(
        self, shape: int | tuple[int, ...], eps: float, *, weight: bool = True, bias: bool = True, offset: bool = False
    ) -> None:
        super().__init__()
        self.dim, self.eps, self.offset = shape if isinstance(shape, int) else shape[-1], eps, offset
        self.weight = nn.Parameter(torch.empty(shape)) if weight else None
        self.bias = nn.Parameter(torch.empty(shape)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        weight, bias = _scale_of(self.weight, self.offset), self.bias
        if weight is not None and weight.dim() > 1:
            normed = F.layer_norm(x.to(weight.dtype), (self.dim,), None, None, self.eps) * weight
            return (normed if bias is None else normed + bias).to(x.dtype)
        if weight is None or weight.dtype == x.dtype:
            return F.layer_norm(x, (self.dim,), weight, None if bias is None else bias.to(x.dtype), self.eps)
        wide = x.to(weight.dtype)
        return F.layer_norm(wide, (self.dim,), weight, None if bias is None else bias.to(wide.dtype), self.eps).to(
            x.dtype
        )


def _scale_of(weight: Tensor | None, offset: bool) -> Tensor | None:
    """Return what a norm multiplies by; one plus a small weight is added up in fp32."""
    return 1.0 + weight.float() if offset and weight is not None else weight


def make_norm(config: ModelConfig) -> nn.Module:
    """Return the norm layer of the residual stream that the config asks for."""
    return norm_of(config, config.dim, weight=config.norm_weight, bias=config.norm_bias)


def norm_of(
    config: ModelConfig, shape: int | tuple[int, ...], *, weight: bool = True, bias: bool = False
) -> RMSNorm | LayerNorm:
    """Return a norm of the config's kind over the last dimension of `shape`, the shape of its weight."""
    offset = config.norm_unit_offset
    if config.norm == "rms":
        return RMSNorm(shape, config.norm_eps, weight=weight, offset=offset)
    return LayerNorm(shape, config.norm_eps, weight=weight, bias=bias, offset=offset)


class XIELU(nn.Module):
    """xIELU (Huang and Schlag, 2024): quadratic above zero, exponential below, with learned coefficients."""

    CONSTANTS: ClassVar[dict[str, float]] = {"alpha_p": 0.8, "alpha_n": 0.3, "beta": 0.5, "eps": -1e-6}
    """Initial values; the coefficients are the softplus of `alpha_p` and `alpha_n`, which start at its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        # Constants that checkpoints hold as tensors.
        self.beta = nn.Parameter(torch.empty(1), requires_grad=False)
        self.eps = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function elementwise, in the dtype of x."""
        beta, eps = self.beta.to(x.dtype), self.eps.to(x.dtype)
        above, below = F.softplus(self.alpha_p).to(x.dtype), F.softplus(self.alpha_n).to(x.dtype) + beta
        return torch.where(x > 0, above * x * x, (torch.expm1(torch.minimum(x, eps)) - x) * below) + beta * x

    @classmethod
    def initial(cls, name: str) -> float:
        """Return the initial value of a parameter."""
        value = cls.CONSTANTS[name]
        return math.log(math.expm1(value)) if name.startswith("alpha") else value


def activate(name: str, x: Tensor) -> Tensor:
    """Apply an activation function without parameters, by its name in the config."""
    if name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if name == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if name == "relu_squared":
        return F.relu(x).square()
    if name == "gelu":
        return F.gelu(x)
    return F.silu(x) if name == "silu" else F.relu(x)
