"""Fit the efficiencies of a framework to measured steps: coordinate descent on log factors, with a prior at 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from piledriver.plan.time.rates import Efficiency

CLASSES = ("matmul", "attention", "memory", "link", "network", "launch")
# How firmly a class is held at its start, relative to the others: devices' own rates of matrix products are known best,
# the host's cost of a kernel least.
_FIRMNESS = {"matmul": 4.0, "launch": 1 / 16}
_BOUNDS = {"launch": (1e-6, 200e-6)}


def fit_efficiency(
    predict: Sequence[Callable[[Efficiency], float]],
    measured: Sequence[float],
    *,
    start: Efficiency | None = None,
    names: Sequence[str] = CLASSES,
    prior: float = 0.08,
    rounds: int = 6,
) -> Efficiency:
    """Return the efficiency whose predictions are nearest to the measured seconds, by mean squared log error.

    `prior` keeps factors that the measurements say nothing about near the start.
    """
    first = found = start or Efficiency()

    def error(candidate: Efficiency) -> float:
        total = 0.0
        for one, seconds in zip(predict, measured, strict=True):
            # Large errors count linearly, so that one odd row does not decide.
            miss = abs(math.log(one(candidate) / seconds))
            total += miss * miss if miss < 0.3 else 0.6 * miss - 0.09
        moved = sum(_moved(candidate, first, name) for name in names)
        return total / len(measured) + prior * moved / len(measured)

    best = error(found)
    step = 0.5
    for _ in range(rounds):
        for name in names:
            for sign in (1, -1):
                while True:
                    value = getattr(found, name) * math.exp(sign * step)
                    low, high = _BOUNDS.get(name, (0.05, 4.0))
                    if not low <= value <= high:
                        break
                    tried = replace(found, **{name: value})
                    now = error(tried)
                    if now >= best - 1e-9:
                        break
                    found, best = tried, now
        step /= 2
    return found


def _moved(candidate: Efficiency, first: Efficiency, name: str) -> float:
    """Return how far a factor is from its start."""
    return _FIRMNESS.get(name, 1.0) * math.log(getattr(candidate, name) / getattr(first, name)) ** 2
