"""The settings of each row of logits, and what is drawn."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RowSettings(NamedTuple):
    """Settings of each row, as tensors of [rows]."""

    temperature: Tensor
    """fp32; 0 chooses the most likely token, of equal ones the first."""
    uniform: Tensor
    """fp32 in [0, 1)."""
    top_k: Tensor
    """int32; 0 for all tokens."""
    top_p: Tensor
    """fp32; 1 for all tokens."""
    min_p: Tensor
    """fp32; 0 for all tokens."""
    truncates: bool
    """Whether any row uses top_k, top_p or min_p."""


class Drawn(NamedTuple):
    """Tokens, and their log-probabilities under the softmax of the unchanged logits."""

    tokens: Tensor
    """[rows] int64."""
    logprobs: Tensor
    """[rows] fp32."""
