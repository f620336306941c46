"""ALiBi: attention scores fall linearly with distance, with one slope per head (Press et al., 2021)."""

from __future__ import annotations

import math


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head: a geometric series from 2^(-8/heads).

    For head counts that are not powers of two, every second slope of the next power is added.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-8.0 * (i + 1) / (2 * power)) for i in range(0, 2 * (heads - power), 2)]
    return slopes + between
