"""AWQ: scale up the input channels that carry large activations before rounding (Lin et al., 2023).

The scale of a channel is its mean magnitude to a power that is searched for on a grid. Then the range of each group is
shrunk where that lowers the error, given the errors of the other groups. Errors are those of the layer's output on the
calibration text, which follow from the second moments of its input:
|X (W' - W)^T|^2 = tr((W' - W) X^T X (W' - W)^T).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from piledriver.compress.calibration import LayerStatistics
from piledriver.compress.scheme import Scheme
from piledriver.kernels.linear import QuantisedWeight, WeightGrid, weight_grid

STEPS = 20
"""Powers from 0 (no scale) to 1 that are tried."""
_CLIPS = 20
_SMALLEST_CLIP = 0.5


def output_error(difference: Tensor, hessian: Tensor) -> float:
    """Return the mean squared error of the outputs for a difference of weights, summed over outputs."""
    return float(((difference @ hessian) * difference).sum())


@torch.no_grad()
def search_scale(weight: Tensor, statistics: LayerStatistics, scheme: Scheme) -> tuple[Tensor, float]:
    """Return the best scale of the input channels, and its power.

    >>> statistics = LayerStatistics(32, torch.device("cpu"))
    >>> x = torch.randn(64, 32) * torch.tensor([30.0] + 31 * [1.0])
    >>> statistics.add(x)
    >>> scale, power = search_scale(torch.randn(8, 32), statistics, Scheme.named("w4a16-g32"))
    >>> bool(scale[0] > scale[1:].mean())
    True
    """
    hessian, size = statistics.hessian, statistics.mean_magnitude
    best: tuple[float, Tensor, float] | None = None
    for step in range(STEPS):
        power = step / STEPS
        scale = channel_scale(size, power)
        grid = _grid(weight * scale, scheme)
        rounded = grid.values(grid.codes(weight * scale)) / scale
        error = output_error(rounded - weight.float(), hessian)
        if best is None or error < best[0]:
            best = error, scale, power
    assert best is not None
    return best[1], best[2]


def channel_scale(size: Tensor, power: float) -> Tensor:
    """Return size^power with largest times smallest value 1; channels without input count as small ones."""
    scale = size.clamp(min=1e-4).pow(power)
    scale = scale / (scale.max() * scale.min()).sqrt()
    return scale.to(torch.float32)


@torch.no_grad()
def search_clip(weight: Tensor, hessian: Tensor, scheme: Scheme) -> WeightGrid:
    """Return the grid with the best range of each group, by the error of the output.

    Groups are chosen in order, each with the errors that the others cause now: inputs are correlated, so that errors of
    two groups add up or cancel.
    """
    best = _grid(weight, scheme)
    groups = best.scales.shape[1]
    width = weight.shape[1] // groups
    clips = [torch.tensor(1.0 - step * (1.0 - _SMALLEST_CLIP) / _CLIPS, device=weight.device) for step in range(_CLIPS)]
    errors = best.values(best.codes(weight)) - weight.float()
    # (errors of all columns) x Hessian: half the gradient of the squared error of the output.
    pull = errors @ hessian
    rows = torch.arange(len(weight), device=weight.device)
    for group in range(groups):
        part = slice(group * width, (group + 1) * width)
        inner, columns = hessian[part, part], weight[:, part]
        grids = [_grid(columns, scheme, clip) for clip in clips]
        tried = torch.stack([grid.values(grid.codes(columns)) - columns.float() for grid in grids])
        others = pull[:, part] - errors[:, part] @ inner
        which = ((tried @ inner + 2 * others) * tried).sum(dim=2).argmin(dim=0)
        change = tried[which, rows] - errors[:, part]
        pull += change @ hessian[part]
        errors[:, part] += change
        best.scales[:, group] = torch.stack([grid.scales[:, 0] for grid in grids])[which, rows]
        if best.zeros is not None:
            best.zeros[:, group] = torch.stack([cast(Tensor, grid.zeros)[:, 0] for grid in grids])[which, rows]
    return best


def round_clipped(weight: Tensor, hessian: Tensor, scheme: Scheme) -> QuantisedWeight:
    """Return the weight rounded to the grid of `search_clip`; 8-bit weights are not clipped."""
    grid = search_clip(weight, hessian, scheme) if scheme.weights == "int4" else _grid(weight, scheme)
    return grid.pack(grid.codes(weight))


def _grid(weight: Tensor, scheme: Scheme, clip: Tensor | None = None) -> WeightGrid:
    return weight_grid(weight, scheme.weights, group=scheme.group, symmetric=scheme.symmetric, clip=clip)
