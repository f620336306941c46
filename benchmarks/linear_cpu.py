"""Linear layers with int8 and int4 weights on a CPU, beside torch's own kernels and the dense product.

    python benchmarks/linear_cpu.py

A row is one weight and a number of tokens M. All take turns, several weights in a row exceed the caches, and the median
of the rounds counts. `ours` and `dense` compute in fp32. `theirs` are torch's `_weight_int8pack_mm` and
`_weight_int4pack_mm_for_cpu` with inputs and scales in bf16, for which they are optimised. `ratio` is our time over
theirs, `speed_over_dense` the time of our dense fp32 product over ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from piledriver.kernels.linear import QuantisedWeight, linear, quantise_weight, weight_codes

SHAPES = ((8192, 2048), (768, 2048), (2048, 768))
"""Rows and columns of the weights."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256)
_BYTES = 150_000_000
_GROUP = 128


def torch_product(small: QuantisedWeight) -> Callable[[Tensor], Tensor]:
    """Return the product with the same codes by torch's kernel, of bf16 inputs."""
    scales = small.scales.bfloat16()
    if small.kind == "int8":
        return partial(_int8, small.data, scales[:, 0].contiguous())
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight_codes(small, torch.int32), 1)
    # A scale, and what code 8 stands for.
    grid = torch.stack((scales, torch.zeros_like(scales)), dim=-1).transpose(0, 1).contiguous()
    return partial(_int4, packed, grid)


def _int8(codes: Tensor, scales: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten._weight_int8pack_mm(x, codes, scales)


def _int4(packed: Tensor, grid: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, _GROUP, grid)


def microseconds(calls: dict[str, list[Callable[[], Any]]], rounds: int) -> dict[str, float]:
    """Return the median time of a call of each group, all in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, group in calls.items():
            began = time.perf_counter()
            for call in group:
                call()
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - began) / len(group) * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {"ours": {}, "theirs": {}, "dense": {}}
    for rows, columns in SHAPES:
        weights = [torch.randn(rows, columns) * 0.02 for _ in range(max(2, _BYTES // (4 * rows * columns)))]
        for kind in ("int8", "int4"):
            small = [quantise_weight(weight, kind) for weight in weights]  # type: ignore[arg-type]
            peers = [torch_product(one) for one in small]
            for tokens in TOKENS:
                x = torch.randn(tokens, columns)
                half, name = x.bfloat16(), f"{kind} {columns}x{rows}, M={tokens}"
                error = float((linear(x, small[0]) - peers[0](half).float()).norm() / linear(x, small[0]).norm())
                assert error < 0.02, f"{name}: {error}"
                calls: dict[str, list[Callable[[], Any]]] = {
                    "ours": [partial(linear, x, one) for one in small],
                    "theirs": [partial(peer, half) for peer in peers],
                    "dense": [partial(linear, x, weight) for weight in weights],
                }
                found = microseconds(calls, options.rounds)
                for key, value in found.items():
                    figures[key][name] = round(value, 1)
                line: dict[str, Any] = {"row": f"linear_cpu: {name}", "us": figures["ours"][name]}
                line |= {"ratio": round(found["ours"] / found["theirs"], 3)}
                print(json.dumps({**line, "speed_over_dense": round(found["dense"] / found["ours"], 2)}), flush=True)
    print(json.dumps({"row": "linear_cpu", "unit": "us", "threads": torch.get_num_threads(), **figures}))


if __name__ == "__main__":
    main()
