"""SmoothQuant: move the outliers of activations into the weights, where 8 bits hold them (Xiao et al., 2022).

The paper scales what norms produce. Here the values of attention and the up projection of a gated MLP are scaled too,
because the inputs of `out` and `down` have outliers of their own.
"""

from __future__ import annotations

from torch import Tensor

from piledriver.compress.calibration import LayerStatistics


def smoothing_scale(weight: Tensor, statistics: LayerStatistics, strength: float = 0.5) -> Tensor:
    """Return max|x|^strength / max|w|^(1 - strength) of each input channel, with which weights are multiplied.

    >>> import torch
    >>> statistics = LayerStatistics(2, torch.device("cpu"))
    >>> statistics.add(torch.tensor([[16.0, 1.0]]))
    >>> smoothing_scale(torch.ones(3, 2), statistics)
    tensor([4., 1.])
    """
    inputs = statistics.largest.clamp(min=1e-5)
    weights = weight.detach().float().abs().amax(dim=0).clamp(min=1e-5)
    return (inputs.pow(strength) / weights.pow(1.0 - strength)).clamp(min=1e-5)
