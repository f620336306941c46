"""The kernel and tile of products with int8 and int4 weights, by shape and number of tokens.

`tuned.json` holds what `benchmarks/linear.py --sweep --choose` found fastest on one H200; since then some
entries of int8 were edited after measurements of those entries alone. Deterministic mode does not read it: there the
division of the columns must depend on the weight alone.
"""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any

from piledriver.kernels.quantised_weight import QuantisedWeight

MANY: dict[str, Any] = {"kernel": "dequantised"}
"""Beyond the table: the time to dequantise a weight is small beside the product."""
TILED: dict[str, Any] = {"kernel": "mixed", "bn": 64, "bm": 128, "bk": 128, "warps": 4, "stages": 3, "parts": 1}
"""In place of the warp-specialised kernel, where it cannot run; fewer tokens have a smaller `bm`."""
_MOST_TILED = 1024
"""Tokens up to which it is faster than a weight that is dequantised first."""
_PROCESSORS = 132


def tuned_kernel(weight: QuantisedWeight, tokens: int, *, specialised: bool = True) -> dict[str, Any]:
    """Return `kernel` and its tile: those of the next larger measured product.

    A kernel is rows, pipelined_rows, streamed_rows, tiles, mixed, warp_specialised (if `specialised`: it can run) or
    dequantised. With pipelined_rows, streamed_rows and some of warp_specialised comes the tile of tiles, for what these
    kernels do not take. `resident_rows` is not in the table: it is faster than all of these, and takes what fits it.

    >>> import torch
    >>> weight = QuantisedWeight("int8", torch.zeros(8, 4096, dtype=torch.int8), torch.ones(8, 1))
    >>> tuned_kernel(weight, 100_000)["kernel"]
    'dequantised'
    """
    by_columns = _table()[weight.kind]
    columns = [width for width in by_columns if width >= weight.shape[1]]
    by_tokens = by_columns[min(columns) if columns else max(by_columns)]
    counts = [count for count in by_tokens if count >= tokens]
    tile = by_tokens[min(counts)] if counts else MANY
    if tile["kernel"] == "warp_specialised":
        if specialised:
            return {"kernel": "warp_specialised"}
        if "bn" in tile:
            tile = {**tile, "kernel": "tiles"}
        else:
            width = 32 if tokens <= 32 else 64 if tokens <= 64 else TILED["bm"]
            tile = {**TILED, "bm": width} if tokens <= _MOST_TILED else MANY
    if "bn" not in tile:
        return tile
    tiles = -(-weight.shape[0] // tile["bn"]) * -(-tokens // tile["bm"])
    # Columns of a small weight are divided into more parts, so that all processors have work.
    return {**tile, "parts": max(tile["parts"], min(_PROCESSORS // tiles, 4, weight.shape[1] // 512))}


@functools.cache
def _table() -> dict[str, dict[int, dict[int, dict[str, Any]]]]:
    text = files("piledriver.kernels.linear").joinpath("tuned.json").read_text()
    return {
        kind: {int(width): {int(count): tile for count, tile in rows.items()} for width, rows in widths.items()}
        for kind, widths in json.loads(text).items()
    }
