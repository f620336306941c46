"""Attention of a decode step over a paged KV cache on a GPU: share of the bandwidth of a plain copy, by dtype.

    python benchmarks/paged_attention.py                     # CUDA: 32 sequences of 8,192 tokens, the 1.2B shape
    python benchmarks/paged_attention.py --context 2048

`ours` is the rate at which the cache is read over that of a copy in the same run; pages of a sequence are scattered.
`peer` is `scaled_dot_product_attention` in bf16 over a contiguous cache of the same size.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from linear import copy_bandwidth, seconds_each

from piledriver.kernels.attention import ScoreOptions
from piledriver.kernels.paged_attention import PagedBatch, allocate_pages, page_bytes, paged_attention
from piledriver.models.presets import preset

SIZE = 16
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=8192)
    args = parser.parse_args()
    shape = preset("llama-1.2b")
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    rows, context = args.sequences, args.context
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    width = context // SIZE
    tables = torch.randperm(rows * width, device="cuda").view(rows, width).int()
    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
    contexts = torch.full((rows,), context, device="cuda", dtype=torch.int32)
    q = torch.randn(rows, heads, dim, device="cuda", dtype=torch.bfloat16)
    ours = {}
    for name, dtype in DTYPES.items():
        pages = [allocate_pages(rows * width, kv_heads, SIZE, dim, dtype=dtype, device="cuda") for _ in range(2)]
        moved = 2 * rows * width * kv_heads * page_bytes(SIZE, dim, dtype)
        for invariant in (False, True):
            batch = PagedBatch(tables, starts, contexts, starts[:-1].long(), 1, context, invariant=invariant)
            spent = seconds_each([partial(paged_attention, q, *pages, batch, ScoreOptions(dim**-0.5))] * 4)
            ours[f"{name}, deterministic" if invariant else name] = round(moved / spent / bandwidth, 3)
        del pages
    k, v = torch.zeros(2, rows, kv_heads, context, dim, device="cuda", dtype=torch.bfloat16)
    attention = partial(F.scaled_dot_product_attention, q[:, :, None], k, v, enable_gqa=heads != kv_heads)
    spent = seconds_each([attention] * 4)
    print(
        json.dumps(
            {
                "row": "paged attention",
                "unit": f"share of copy bandwidth, {rows} sequences of {context:,} tokens",
                "ours": ours,
                "peer": round((k.nbytes + v.nbytes) / spent / bandwidth, 3),
                "limit": 1.0,
                "copy_tb_per_s": round(bandwidth / 1e12, 3),
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
