"""torch's private API that this room uses, so that a torch upgrade is one file."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a module's input or output is hooked; torch has no public way to ask."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T of int8 matrices, summed in int32.

    The GPU kernel takes more than 16 rows and widths in multiples of 8: zeros fill the rest.
    """
    rows, outputs = len(x), len(weight)
    if x.is_cuda:
        wide, tall = -x.shape[1] % 8, -outputs % 8
        x, weight = F.pad(x, (0, wide, 0, max(0, 17 - rows))), F.pad(weight, (0, wide, 0, tall))
    return torch._int_mm(x, weight.t())[:rows, :outputs]
