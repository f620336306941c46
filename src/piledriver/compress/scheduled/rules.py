"""Rules of scheduled compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class WeightRule:
    """Round a weight in the forward; gradients reach the full weight.

    >>> rule = WeightRule(start_bits=12, target_bits=8, period=50)
    >>> [rule.bits_at(step) for step in (0, 49, 50, 150, 10_000)]
    [12, 12, 11, 10, 8]
    """

    target_bits: int
    start_bits: int
    period: int = 1
    """Steps until the first bit goes; each further one takes twice as many (MoQ)."""
    groups: int = 1
    """Parts of the flattened weight with a scale each."""
    symmetric: bool = True
    offset: int = 0
    """First step at which the weight is rounded."""

    def bits_at(self, step: int) -> int:
        """Return the bits of a step."""
        bits, end, period = self.start_bits, self.offset + self.period, self.period
        while bits > self.target_bits and step >= end:
            bits -= 1
            period *= 2
            end += period
        return bits


@dataclass(frozen=True, kw_only=True)
class ActivationRule:
    """Round the input of a layer: by the range of each token, or by a running range."""

    bits: int
    symmetric: bool = True
    static: bool = False
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class MaskRule:
    """Set a share of a weight to zero: single weights, rows, or the input columns of heads.

    `l1` fixes the mask by magnitude when it begins; `topk` learns a score for each part, whose gradient passes the mask
    (Sanh et al., Movement pruning, 2020).
    """

    kind: Literal["weights", "rows", "heads", "channels"]
    keep: float
    """Share that stays."""
    method: Literal["l1", "topk"] = "l1"
    heads: int = 1
    """Heads, or groups of heads that share keys and values, for kind heads."""
    offset: int = 0
