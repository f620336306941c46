"""A weight of 8 or 4 bits in a module, in place of a parameter."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from piledriver.kernels.linear import QuantisedWeight, dequantise_weight


class QuantisedCodes(nn.Module):
    """A quantised weight as buffers, which follow the module to a device; a cast leaves the codes as they are."""

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None

    casts_scales: ClassVar[bool] = False
    """Whether scales follow a cast that rounds them. Layers that compute in the dtype of their input keep them."""

    def __init__(self, quantised: QuantisedWeight) -> None:
        super().__init__()
        self.kind = quantised.kind
        self.register_buffer("weight", quantised.data)
        self.register_buffer("scales", quantised.scales)
        self.register_buffer("zeros", quantised.zeros)

    @property
    def quantised(self) -> QuantisedWeight:
        """The weight, as kernels take it."""
        return QuantisedWeight(self.kind, self.weight, self.scales, self.zeros)

    def dense(self) -> Tensor:
        """Return the weight that the codes stand for, in the dtype of the scales."""
        return dequantise_weight(self.quantised, self.scales.dtype)

    def _apply(self, fn: object, recurse: bool = True) -> QuantisedCodes:
        data, scales = self.weight, self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight.dtype != data.dtype:  # fp8 codes are floats, which a cast would take
            self.weight = data.to(self.weight.device)
        exact = torch.promote_types(self.scales.dtype, scales.dtype) == self.scales.dtype
        if not (exact or self.casts_scales):
            self.scales = scales.to(self.scales.device)
        return self


def first_weight(model: nn.Module) -> Tensor:
    """Return a weight whose dtype and device are the model's.

    It is a parameter, or the scales of codes: a model whose norms have no weights may have no parameters.
    """
    found = next(model.parameters(), None)
    return next(each.scales for each in model.modules() if isinstance(each, QuantisedCodes)) if found is None else found
