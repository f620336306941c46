"""The inputs of a decode step, one token a sequence, as the forward pass reads them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepTensors(NamedTuple):
    """Tensors with a row for each sequence."""

    tokens: Tensor
    """[rows] int64."""
    positions: Tensor
    """[rows] int64."""
    contexts: Tensor
    """[rows] int32: position + 1."""
    slots: Tensor
    """[rows] int64: where the token's key and value are stored."""
    tables: Tensor
    """[rows, blocks] int32."""
