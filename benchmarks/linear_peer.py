"""Weight-only linear layers beside gemlite's kernels, for 1 to 64 tokens on a GPU.

    pip install gemlite
    python benchmarks/linear_peer.py                     # gemlite times its own tiles first: minutes
    python benchmarks/linear_peer.py --config FILE       # tiles that gemlite ships or `gemlite.cache_config` wrote

Weights, tokens and the clock are those of `benchmarks/linear.py`: copies of a weight exceed the L2 cache and take turns
in a CUDA graph. Both multiply the same int8 codes with a scale for each row, or int4 codes in groups of 128 columns.
`ratio` is gemlite's time over ours. Each weight is measured by a process of its own; all warm up at the same time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from in_turn import measure, my_turn
from linear import SHAPES, copies, seconds_each

from piledriver.kernels.linear import QuantisedWeight, linear, weight_codes
from piledriver.kernels.linear.dequantise import dequantise_integers

TOKENS = (1, 2, 4, 8, 16, 32, 64)


def gemlite_layer(weight: QuantisedWeight) -> Any:
    """Return gemlite's layer with the codes and scales of a weight."""
    from gemlite import helper

    codes = weight_codes(weight)
    if weight.kind == "int8":
        layer = helper.A16W8_INT8(dtype=torch.bfloat16)
        return layer.from_weights(codes.to(torch.int8), scales=weight.scales.to(torch.bfloat16))
    zeros = torch.full_like(weight.scales, 8, dtype=torch.bfloat16)
    layer = helper.A16W4_HQQ_INT(dtype=torch.bfloat16)
    return layer.from_weights(codes.to(torch.uint8), weight.scales.to(torch.bfloat16), zeros)


def one(kind: str, columns: int, rows: int, config: str | None) -> dict[str, Any]:
    """Return microseconds of both by the number of tokens."""
    import gemlite

    if config is not None:
        gemlite.load_config(config)
    torch.manual_seed(0)
    ours = copies(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02, kind)
    theirs = [gemlite_layer(weight) for weight in ours]
    inputs = {count: torch.randn(count, columns, device="cuda", dtype=torch.bfloat16) for count in TOKENS}
    errors = {}
    for count, x in inputs.items():
        expected = F.linear(x, dequantise_integers(ours[0], x.dtype)).float()
        for name, found in (("ours", linear(x, ours[0])), ("theirs", theirs[0](x))):
            errors[f"{name}, M={count}"] = float((found.float() - expected).abs().max() / expected.abs().max())
    my_turn()
    times: dict[str, Any] = {"ours": {}, "theirs": {}, "errors": errors}
    for count, x in inputs.items():
        name = f"{kind} {columns}x{rows}, M={count}"
        times["ours"][name] = round(1e6 * seconds_each([partial(linear, x, weight) for weight in ours]), 2)
        times["theirs"][name] = round(1e6 * seconds_each([partial(layer, x) for layer in theirs]), 2)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="gemlite's tiles")
    parser.add_argument("--one", help="measure this weight")
    options = parser.parse_args()
    if not torch.cuda.is_available() or importlib.util.find_spec("gemlite") is None:
        print(json.dumps({"row": "linear_peer", "ours": None, "why": "needs a GPU and gemlite"}))
        return
    if options.one:
        kind, columns, rows = options.one.split(",")
        print(json.dumps(one(kind, int(columns), int(rows), options.config)), flush=True)
        return
    names = [f"{kind},{columns},{rows}" for rows, columns in SHAPES for kind in ("int4", "int8")]
    given = [] if options.config is None else ["--config", options.config]
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    for name, found in measure(__file__, names, given):
        print(json.dumps({"row": f"linear_peer: {name}", **found}), flush=True)
        ours |= found.get("ours", {})
        theirs |= found.get("theirs", {})
    ratios = {name: round(theirs[name] / time, 3) for name, time in ours.items()}
    print(json.dumps({"row": "linear_peer", "unit": "us", "ours": ours, "theirs": theirs, "ratio": ratios}), flush=True)


if __name__ == "__main__":
    main()
