"""Position encodings: sinusoidal, rotary, learned, and ALiBi."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from piledriver.functional.errors import InputShapeError
from piledriver.functional.frame import Axes, Initialiser
from piledriver.functional.initialisers import scaled_normal
from piledriver.functional.module import Module
from piledriver.kernels.attention.masks import alibi_slopes


def sinusoidal(length: int, features: int, *, base: float = 10000.0, device: torch.device | None = None) -> Tensor:
    """Return sines and cosines of geometric wavelengths, (length, features) (Vaswani et al., 2017)."""
    if features % 2:
        raise InputShapeError(None, f"sinusoidal positions of {features} features", "use an even number")
    rates = torch.exp(torch.arange(0, features, 2, device=device).float() * (-math.log(base) / features))
    angles = torch.arange(length, device=device).float()[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).reshape(length, features)


def rotary_tables(positions: Tensor, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for `rotate_heads`, in fp32, shape (*positions, head_dim)."""
    if head_dim % 2:
        raise InputShapeError(None, f"rotary positions for heads of {head_dim}", "use an even head size")
    steps = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions.float()[..., None] * (1.0 / base**steps)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def first_rotary_tables(length: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tables of the positions 0, 1, 2, ..."""
    if not torch.compiler.is_compiling():
        return rotary_tables(torch.arange(length, device=device), head_dim, base)
    cos, sin = _first_tables(length, head_dim, base, device)
    return cos, sin


@torch.library.custom_op("piledriver::first_rotary_tables", mutates_args=())
def _first_tables(length: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Hide the tables from compilers, which would compute sines and powers inside every kernel that reads them."""
    return rotary_tables(torch.arange(length, device=device), head_dim, base)


@_first_tables.register_fake
def _(length: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    cos = torch.empty(length, head_dim, device=device)
    return cos, torch.empty_like(cos)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of every head by its position (Su et al., 2021); x is (batch, length, heads, head_dim)."""
    first, second = (x if x.dtype == torch.float64 else x.float()).chunk(2, dim=-1)
    (cos_first, cos_second), (sin_first, sin_second) = (table[..., None, :].chunk(2, dim=-1) for table in (cos, sin))
    turned = torch.cat([first * cos_first - second * sin_first, second * cos_second + first * sin_second], dim=-1)
    return turned.to(x.dtype)


def alibi_bias(heads: int, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Return what ALiBi adds to the scores, (..., heads, queries, keys): minus the distance times the slope.

    Positions are (length,), or (batch, length) where every example has its own. Pass the result as `bias=`.
    """
    slopes = torch.tensor(alibi_slopes(heads), device=key_positions.device)
    distance = (query_positions[..., None, :, None] - key_positions[..., None, None, :]).abs()
    return -slopes[:, None, None] * distance


class LearnedPositions(Module):
    """A learned vector for every position, added to the input (batch, length, features)."""

    max_length: int
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    init_fn: Initialiser = scaled_normal(0.02)
    axes: Axes | None = None

    def __call__(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Add the vectors of the positions (0, 1, 2, ... where none are given)."""
        length = x.shape[-2]
        if length > self.max_length:
            raise InputShapeError(
                self.path, f"a sequence of {length} for {self.max_length} learned positions", "raise max_length"
            )
        table = self.param("embedding", self.init_fn, (self.max_length, x.shape[-1]), self.param_dtype, self.axes)
        try:
            rows = table[:length] if positions is None else table[positions]
        except IndexError as error:
            raise InputShapeError(
                self.path,
                f"the position {int(positions.max()) if positions is not None else length} of {self.max_length}",
                "raise max_length",
            ) from error
        dtype = x.dtype if self.dtype is None else self.dtype
        return x.to(dtype) + rows.to(dtype)
