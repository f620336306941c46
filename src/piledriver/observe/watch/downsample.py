"""Reduce a curve to what a chart can show, keeping its extremes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Curve(NamedTuple):
    """Points of a chart. Each stands for neighbouring values: their mean, smallest and largest."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def downsample(x: np.ndarray, y: np.ndarray, points: int) -> Curve:
    """Return at most `points` points, with the mean and the extremes of the values that each stands for.

    Values that are not finite are left out; a point without any value is NaN, so that a gap stays a gap.

    >>> x = np.arange(1000.0)
    >>> curve = downsample(x, np.where(x == 500, 9.0, 0.0), 100)
    >>> len(curve.x), float(curve.high.max()), float(curve.x[curve.high.argmax()])
    (100, 9.0, 504.5)
    """
    count = len(x)
    y = np.where(np.isfinite(y), y, np.nan)
    if count <= points:
        return Curve(x, y, y, y)
    size = -(-count // points)
    short = -count % size
    # The last group is filled up with missing values.
    x = np.concatenate([x, np.full(short, x[-1])]).reshape(-1, size).mean(axis=1)
    y = np.concatenate([y, np.full(short, np.nan)]).reshape(-1, size)
    known = ~np.isnan(y)
    found = known.any(axis=1)
    # Divided first: the sum of large values overflows.
    shares = np.where(known, y, 0.0) / np.maximum(1, known.sum(axis=1, keepdims=True))
    mean = np.where(found, shares.sum(axis=1), np.nan)
    low = np.where(found, np.where(known, y, np.inf).min(axis=1), np.nan)
    high = np.where(found, np.where(known, y, -np.inf).max(axis=1), np.nan)
    return Curve(x, mean, low, high)


def averages(times: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the mean of the values in each interval of `edges`, NaN where there are none."""
    known = np.isfinite(values) & np.isfinite(times)
    place = np.clip(np.searchsorted(edges, times[known], side="right") - 1, 0, len(edges) - 2)
    total = np.bincount(place, weights=values[known], minlength=len(edges) - 1)
    count = np.bincount(place, minlength=len(edges) - 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / count
