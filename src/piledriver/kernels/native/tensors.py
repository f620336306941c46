"""Which tensors the C kernels can read: they get addresses, and nothing that torch would check."""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.native.steps import KINDS, WIDEST, WeightAddress
from piledriver.kernels.quantised_weight import QuantisedWeight


def is_plain(*tensors: Tensor | None) -> bool:
    """Return whether all tensors that are given are contiguous fp32 in host memory."""
    return all(x is None or (x.is_cpu and x.dtype == torch.float32 and x.is_contiguous()) for x in tensors)


def weight_address(weight: Tensor | QuantisedWeight) -> WeightAddress:
    """Return what a C kernel reads a weight by; it does not keep the weight."""
    if isinstance(weight, Tensor):
        return WeightAddress(weight.data_ptr(), None, None, 0, KINDS["fp32"])
    zeros = None if weight.zeros is None else weight.zeros.data_ptr()
    return WeightAddress(weight.data.data_ptr(), weight.scales.data_ptr(), zeros, weight.group, KINDS[weight.kind])


def fits_native_weight(weight: Tensor | QuantisedWeight) -> bool:
    """Return whether the C kernel reads a weight, apart from the dtype of its scales."""
    if isinstance(weight, Tensor):
        return is_plain(weight)
    rows, columns = weight.shape
    grid = (rows, columns // weight.group)
    if weight.scales.shape != grid or grid[1] * weight.group != columns:
        return False
    if weight.zeros is not None and weight.zeros.shape != grid:
        return False
    if weight.group % (2 * WIDEST if weight.kind == "int4" else WIDEST) or (weight.kind == "int8" and grid[1] > 1):
        return False
    parts = (weight.data, weight.scales, weight.zeros)
    return all(part is None or (part.is_cpu and part.is_contiguous()) for part in parts)
