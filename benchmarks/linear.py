"""Weight-only linear layers of decoding on a GPU: bandwidth of int8 and int4 weights at small batches, speed at large.

    python benchmarks/linear.py                          # CUDA; about 40 s, most of it compilation

A row is one weight shape, kind and number of tokens M. Weights rotate through copies that exceed the L2 cache, in a
CUDA graph, so that every call reads its weight from memory. For M up to 16, `ours` is the share of the bandwidth of a
plain copy (measured in the same run) at which the bytes of the weight and its scales are read; beyond, bf16's time over
ours. `peer` is a bf16 product of the same shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from piledriver.kernels.linear import QuantisedWeight, linear, quantise_weight

SHAPES = ((8192, 2048), (14336, 4096))
"""Rows and columns of the weights."""
SMALL, LARGE = (1, 2, 4, 8, 16), (32, 64, 128, 512, 2048)
_L2_BYTES = 200e6


def seconds_each(calls: list[Callable[[], Any]], repeats: int = 7) -> float:
    """Return the median seconds of one of `calls`, which run in turn in a CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times) / len(calls)


def copy_bandwidth() -> float:
    """Return the bytes per second, read and written, of a kernel that copies 1 GiB; a copy engine is slower."""
    source = torch.zeros(2**28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 8 * source.numel() / seconds_each([partial(torch.neg, source, out=target)] * 4)


def bytes_of(weight: QuantisedWeight) -> int:
    return sum(part.numel() * part.element_size() for part in (weight.data, weight.scales))


def copies(weight: Tensor, kind: str) -> list[Any]:
    """Return the weight in as many copies as exceed the cache."""
    one: Any = weight if kind == "bf16" else quantise_weight(weight, kind)  # type: ignore[arg-type]
    size = weight.numel() * 2 if kind == "bf16" else bytes_of(one)
    count = max(2, int(_L2_BYTES / size) + 1)
    if kind == "bf16":
        return [weight.clone() for _ in range(count)]
    return [QuantisedWeight(one.kind, one.data.clone(), one.scales.clone()) for _ in range(count)]


def rows_of(kinds: list[str], limit_rows: int) -> None:
    copied = copy_bandwidth()
    print(json.dumps({"row": "linear: copy", "ours": round(copied / 1e12, 3), "unit": "TB/s"}), flush=True)
    microseconds: dict[str, dict[str, float]] = {"ours": {}, "bf16": {}}
    for tokens in (*SMALL, *LARGE):
        if tokens > limit_rows:
            break
        for rows, columns in SHAPES:
            weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02
            x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
            dense = copies(weight, "bf16")
            plain = seconds_each([partial(F.linear, x, w) for w in dense])
            del dense
            for kind in kinds:
                small = copies(weight, kind)
                ours = seconds_each([partial(linear, x, w) for w in small])
                share = bytes_of(small[0]) / ours / copied
                name = f"{kind} {columns}x{rows}, M={tokens}"
                microseconds["ours"][name] = round(ours * 1e6, 2)
                microseconds["bf16"][name] = round(plain * 1e6, 2)
                found = {"row": f"linear: {name}", "us": round(ours * 1e6, 2), "bf16_us": round(plain * 1e6, 2)}
                found |= {"speed_over_bf16": round(plain / ours, 3)}
                print(json.dumps({**found, "share_of_copy": round(share, 3)}), flush=True)
    print(json.dumps({"row": "linear", "unit": "us", **microseconds}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="int4,int8")
    parser.add_argument("--most", type=int, default=LARGE[-1], help="most tokens")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"row": "linear", "ours": None, "why": "needs a GPU"}))
        return
    rows_of(options.kinds.split(","), options.most)


if __name__ == "__main__":
    main()
