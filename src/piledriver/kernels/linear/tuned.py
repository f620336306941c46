"""The kernel and tile of products with int8 and int4 weights, by shape and number of tokens.

`tuned.json` holds what `benchmarks/linear.py --sweep --choose` found fastest on one H200. Deterministic mode does not
read it: there the division of the columns must depend on the weight alone.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any

from piledriver.kernels.linear.weights import QuantisedWeight

MANY = {"kernel": "dequantised"}
"""Beyond the table: the time to dequantise a weight is small beside the product."""
_PROCESSORS = 132


def tuned_kernel(weight: QuantisedWeight, tokens: int) -> dict[str, Any]:
    """Return `kernel` (rows, tiles, mixed or dequantised) and its tile: those of the next larger measured product.

    >>> import torch
    >>> weight = QuantisedWeight("int8", torch.zeros(8, 4096, dtype=torch.int8), torch.ones(8, 1))
    >>> tuned_kernel(weight, 100_000)["kernel"]
    'dequantised'
    """
    by_columns = _table()[weight.kind]
    columns = [width for width in by_columns if width >= weight.shape[1]]
    by_tokens = by_columns[min(columns) if columns else max(by_columns)]
    counts = [count for count in by_tokens if count >= tokens]
    return _filled(by_tokens[min(counts)], weight, tokens) if counts else MANY


def _filled(tile: dict[str, Any], weight: QuantisedWeight, tokens: int) -> dict[str, Any]:
    """Return the tile with the columns of a small weight divided into more parts, so that all processors have work."""
    if "bn" not in tile:
        return tile
    tiles = -(-weight.shape[0] // tile["bn"]) * -(-tokens // tile["bm"])
    return {**tile, "parts": max(tile["parts"], min(_PROCESSORS // tiles, 4, weight.shape[1] // 512))}


@functools.cache
def _table() -> dict[str, dict[int, dict[int, dict[str, Any]]]]:
    text = files("piledriver.kernels.linear").joinpath("tuned.json").read_text()
    return {
        kind: {int(width): {int(count): tile for count, tile in rows.items()} for width, rows in widths.items()}
        for kind, widths in json.loads(text).items()
    }
