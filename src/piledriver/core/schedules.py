"""Learning-rate schedules as arithmetic on a position, which is a number or a tensor.

A tensor stays a tensor, so that a compiled train step can contain its schedule; torch itself is not needed here.
"""

from __future__ import annotations

import math
from typing import Any


def schedule_scale(
    kind: str,
    position: Any,
    *,
    warmup: int = 0,
    total: int = 0,
    decay: int = 1,
    decay_shape: str = "linear",
    floor: float = 0.0,
) -> Any:
    """Return the fraction of the peak learning rate at a position.

    It rises linearly from 0 over `warmup`, then follows `kind`: `constant`, `inverse_sqrt`, `linear` or `cosine` down
    to `floor` at `total`, or `wsd`, which stays at 1 and falls over the last `decay` of `total`.

    >>> [schedule_scale("linear", position, warmup=10, total=110) for position in (1, 10, 60, 110, 200)]
    [0.1, 1.0, 0.5, 0.0, 0.0]
    """
    after = _after_warmup(kind, position, warmup, total, decay, decay_shape, floor)
    return _select(position < warmup, position / max(warmup, 1), after)


def _after_warmup(kind: str, position: Any, warmup: int, total: int, decay: int, decay_shape: str, floor: float) -> Any:
    if kind == "constant":
        return position * 0.0 + 1.0
    if kind == "inverse_sqrt":
        start = max(warmup, 1)
        return _clamp(_apply("sqrt", start / _clamp(position, start, math.inf)), floor, math.inf)
    begin, length = (total - decay, decay) if kind == "wsd" else (warmup, total - warmup)
    done = fraction_done(position, begin, length)
    shape = decay_shape if kind == "wsd" else kind
    return floor + (1.0 - floor) * decayed(shape, done)


def fraction_done(position: Any, begin: float, length: float) -> Any:
    """Return how much of a stretch of `length` from `begin` is done, from 0 to 1."""
    return _clamp((position - begin) / max(length, 1), 0.0, 1.0)


def decayed(shape: str, done: Any) -> Any:
    """Return what is left of 1 after a part `done` of a decay: `linear`, `cosine` or `one_minus_sqrt`."""
    if shape == "cosine":
        return 0.5 * (1.0 + _apply("cos", done * math.pi))
    return 1.0 - (done if shape == "linear" else _apply("sqrt", done))


def _apply(function: str, value: Any) -> Any:
    return getattr(math, function)(value) if isinstance(value, (int, float)) else getattr(value, function)()


def _clamp(value: Any, low: float, high: float) -> Any:
    return min(max(value, low), high) if isinstance(value, (int, float)) else value.clamp(low, high)


def _select(condition: Any, yes: Any, no: Any) -> Any:
    return (yes if condition else no) if isinstance(condition, bool) else yes.where(condition, no)
