"""A copy that a condition on the device can suppress: how optimizer steps are skipped without asking the device."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_copy_(old: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """Copy `new` over `old` unless `skip` is true; NaNs of a skipped step do not reach `old`."""
    old.copy_(new if skip is None else torch.where(skip, old, new))
