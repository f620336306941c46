"""Weight-only linear layers of decoding on a GPU: bandwidth of int8 and int4 weights at small batches, speed at large.

    python benchmarks/linear.py                          # CUDA; most of the time is compilation
    python benchmarks/linear.py --least 17 --most 259 --step 1      # numbers of tokens between those of the table
    python benchmarks/linear.py --sweep --workers 14     # other tiles too, compiled by 14 processes
    python benchmarks/linear.py --sweep --choose tuned.json          # the table of `kernels/linear/tuned.py`

A row is one weight shape, kind and number of tokens M. Weights rotate through copies that exceed the L2 cache, in a
CUDA graph, so that every call reads its weight from memory. `share_of_copy` is the share of the bandwidth of a plain
copy of 1 GiB (measured in the same run) at which the bytes of the weight and its scales are read. `copy_us` is a copy
kernel that moves as many bytes as the weight has, and `copy_over_ours` its time over ours: launch and ramp-up take part
of so short a kernel. `speed_over_bf16` is the time of torch's bf16 product of the same shape over ours, `error` the
largest error relative to the largest element. With `--sweep`, rows with a `candidate` are other kernels and tiles.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from piledriver.kernels.linear import QuantisedWeight, linear, quantise_weight
from piledriver.kernels.linear.dequantise import dequantise_integers
from piledriver.kernels.linear.integers.gemv import integer_gemv
from piledriver.kernels.linear.integers.tiles import integer_tiles
from piledriver.kernels.linear.mixed.pipelined_rows import fits_pipelined_rows, pipelined_rows
from piledriver.kernels.linear.mixed.rows import fits_mixed_rows, mixed_rows
from piledriver.kernels.linear.mixed.streamed_rows import fits_streamed_rows, streamed_rows
from piledriver.kernels.linear.mixed.tiles import mixed
from piledriver.kernels.linear.mixed.warp_specialised import warp_specialised

SHAPES = ((8192, 2048), (14336, 4096))
"""Rows and columns of the weights."""
SMALL = (1, 2, 4, 8, 16)
LARGE = (32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 2048, 4096)
_L2_BYTES = 200e6
_MOST_ERROR = 0.02
"""Largest error of a candidate, relative to the largest element of the product."""


def seconds_each(calls: list[Callable[[], Any]], repeats: int = 7) -> float:
    """Return the median seconds of one of `calls`, which run in turn in a CUDA graph."""
    [found] = seconds_in_turns([calls], repeats)
    return found


def seconds_in_turns(groups: Sequence[Sequence[Callable[[], Any]]], repeats: int = 7) -> list[float]:
    """Return the same for several groups of calls, measured in turns: under load a GPU's clock falls with time."""
    graphs = []
    for calls in groups:
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for call in calls:
                call()
        graphs[-1].replay()
    times: list[list[float]] = [[] for _ in groups]
    for _ in range(repeats):
        for graph, found in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 1000)
    return [statistics.median(found) / len(calls) for found, calls in zip(times, groups, strict=True)]


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


def copy_seconds(size: int) -> float:
    """Return the seconds of a kernel that reads and writes `size` bytes in all."""
    pairs = [torch.zeros(2, size // 8, device="cuda") for _ in range(int(_L2_BYTES / size) + 2)]
    return seconds_each([partial(torch.neg, pair[0], out=pair[1]) for pair in pairs])


def candidates(x: Tensor, weight: QuantisedWeight) -> dict[str, Callable[[Tensor, QuantisedWeight], Tensor]]:
    """Return kernels and tiles that could take this product, by their JSON."""
    tokens, int4 = len(x), weight.kind == "int4"
    found: dict[str, Callable[[Tensor, QuantisedWeight], Tensor]] = {}

    def add(kernel: str, *tile: int, **more: int) -> None:
        names = ("bn", "bm", "bk", "warps", "stages", "parts") if tile else ()
        config: dict[str, Any] = {"kernel": kernel, **dict(zip(names, tile, strict=True)), **more}
        found[json.dumps(config)] = partial(KERNELS[kernel], config=config)

    if tokens == 1:
        for rows, warps in ((8, 4), (16, 4), (16, 8)):
            for programs in (132, 264, 396, 528, 1 << 20):
                add("gemv", rows=rows, warps=warps, programs=programs)
    elif tokens <= 16:
        if fits_mixed_rows(x, weight):
            add("rows")
        if fits_pipelined_rows(x, weight, 0):
            add("pipelined_rows")
        if fits_streamed_rows(x, weight, 0):
            add("streamed_rows")
        width = max(8, tokens)
        for parts in (1, 2, 3, 4, 6, 7, 8):
            if int4:
                for bn, warps, stages in ((64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 4, 6), (128, 8, 4), (256, 8, 4)):
                    add("tiles", bn, width, 128, warps, stages, parts)
                add("tiles", 128, width, 128, 4, 4, parts, ahead=512)
                for bn, warps, stages in ((64, 4, 4), (128, 4, 4), (128, 8, 4)):
                    add("mixed", bn, 16, 128, warps, stages, parts)
            elif parts <= 4:
                for bn, bk, stages in ((64, 128, 6), (64, 256, 3), (64, 256, 4), (128, 128, 4), (128, 256, 3)):
                    add("tiles", bn, width, bk, 4, stages, parts)
                for ahead in (256, 512, 1024):
                    add("tiles", 64, width, 256, 4, 4, parts, ahead=ahead)
                for bn, stages in ((64, 4), (128, 3)):
                    add("mixed", bn, 16, 128, 4, stages, parts)
    elif tokens <= 128:
        width = 1 << (tokens - 1).bit_length()
        for parts in (1, 2) if tokens <= 64 else (1,):
            for bn, warps, stages in ((64, 4, 4), (128, 8, 4), (128, 4, 3)):
                if width * bn <= 8192 or warps == 8:
                    add("tiles", bn, min(width, 64 if int4 else 128), 128, warps, stages, parts)
            for bn, bk, warps, stages in ((64, 128, 4, 3), (64, 64, 4, 4), (128, 128, 8, 3)):
                add("mixed", bn, width, bk, warps, stages, parts)
            if tokens > 64:
                add("mixed", 64, 64, 128, 4, 3, parts)
        add("warp_specialised")
    else:
        for together in (8, 32):
            for tile in ((64, 256, 64, 4, 3), (64, 256, 128, 4, 2), (64, 128, 64, 4, 3), (64, 128, 128, 4, 2),
                         (64, 128, 128, 4, 3), (64, 128, 64, 4, 5), (128, 128, 64, 4, 3), (128, 128, 128, 8, 3),
                         (128, 128, 64, 8, 4), (128, 256, 64, 8, 3)):  # fmt: skip
                add("mixed", *tile, 1, together=together)
            for tile in ((128, 64, 128, 4, 3), (128, 64, 64, 4, 6), (64, 128, 128, 4, 2), (64, 128, 64, 4, 5),
                         (128, 128, 128, 8, 4), (128, 64, 128, 4, 2), (128, 64, 64, 4, 4)):  # fmt: skip
                if not int4 or tile[2] == 128:
                    add("tiles", *tile, 1, together=together)
        if tokens <= 384:
            for tile in ((64, 256, 64, 4, 3, 2), (128, 128, 64, 4, 3, 2), (128, 64, 128, 4, 3, 1),
                         (128, 64, 64, 4, 4, 1), (64, 64, 128, 4, 4, 1), (64, 64, 128, 4, 3, 2)):  # fmt: skip
                add("mixed", *tile)
        add("warp_specialised")
        add("dequantised")
    return found


def dequantised(x: Tensor, weight: QuantisedWeight, config: dict[str, int]) -> Tensor:
    """Return the product with a weight that is dequantised first."""
    return F.linear(x, dequantise_integers(weight, x.dtype))


KERNELS: dict[str, Any] = {
    "gemv": integer_gemv,
    "rows": lambda x, weight, config: mixed_rows(x, weight),
    "pipelined_rows": lambda x, weight, config: pipelined_rows(x, weight),
    "streamed_rows": lambda x, weight, config: streamed_rows(x, weight),
    "tiles": integer_tiles,
    "mixed": mixed,
    "warp_specialised": lambda x, weight, config: warp_specialised(x, weight),
    "dequantised": dequantised,
}


def cases(kinds: list[str], least: int, most: int, step: int) -> list[tuple[int, int, int, str]]:
    """Return tokens, rows, columns and kind of what is measured. With `step`, every so many tokens."""
    tokens = range(least, most + 1, step) if step else [n for n in (*SMALL, *LARGE) if least <= n <= most]
    return [(count, rows, columns, kind) for count in tokens for rows, columns in SHAPES for kind in kinds]


def warm_up(measured: list[tuple[int, int, int, str]], share: int, workers: int, *, sweep: bool) -> None:
    """Call a worker's share of the kernels once, so that they are in the cache of compiled ones."""
    for tokens, rows, columns, kind in measured:
        x = torch.zeros(tokens, columns, device="cuda", dtype=torch.bfloat16)
        small = quantise_weight(torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16), kind)  # type: ignore[arg-type]
        for label, call in {"linear": linear, **(candidates(x, small) if sweep else {})}.items():
            # Products that share a kernel are one worker's.
            kernel = re.sub(r', "programs": \d{3}\b', ', "programs": 1', label)
            kernel = re.sub(r'"parts": [2-8]', '"parts": 2', kernel)
            if '"bn"' not in kernel:
                kernel += f" {columns} {tokens}"
            kernel += kind
            if zlib.crc32(kernel.encode()) % workers == share:
                attempt(call, x, small)
    torch.cuda.synchronize()


def attempt(call: Callable[..., Tensor], x: Tensor, weight: QuantisedWeight) -> Tensor | None:
    """Return the result of a candidate, or None if the device has not the memory for its tile."""
    try:
        return call(x, weight)
    except Exception as error:
        print(json.dumps({"row": "linear: failed", "why": repr(error)[:200]}), flush=True)
        return None


def rows_of(measured: list[tuple[int, int, int, str]], *, sweep: bool, limit: float, choose: Path | None) -> None:
    began = time.monotonic()
    copied = copy_bandwidth()
    print(json.dumps({"row": "linear: copy", "ours": round(copied / 1e12, 3), "unit": "TB/s"}), flush=True)
    microseconds: dict[str, dict[str, float]] = {"ours": {}, "theirs": {}}
    copy_of: dict[int, float] = {}
    stored: dict[tuple[int, int, str], list[Any]] = {}
    fastest: dict[str, dict[str, dict[str, tuple[float, dict[str, Any]]]]] = {}
    for tokens, rows, columns, kind in measured:
        if time.monotonic() - began > limit:
            print(json.dumps({"row": "linear", "skipped": f"M={tokens} and more: out of time"}), flush=True)
            break
        torch.manual_seed(0)
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        for one in ("bf16", kind):
            if (rows, columns, one) not in stored:
                weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02
                stored[rows, columns, one] = copies(weight, one)
        dense, small = stored[rows, columns, "bf16"], stored[rows, columns, kind]
        expected = F.linear(x, dequantise_integers(small[0], x.dtype)).float()
        calls = [[partial(F.linear, x, w) for w in dense], [partial(linear, x, w) for w in small]]
        plain, ours = seconds_in_turns(calls)
        error = float((linear(x, small[0]).float() - expected).abs().max() / expected.abs().max())
        size = bytes_of(small[0])
        name = f"{kind} {columns}x{rows}, M={tokens}"
        microseconds["ours"][name] = round(ours * 1e6, 2)
        microseconds["theirs"][name] = round(plain * 1e6, 2)
        found: dict[str, Any] = {"row": f"linear: {name}", "us": round(ours * 1e6, 2), "bf16_us": round(plain * 1e6, 2)}
        found |= {"speed_over_bf16": round(plain / ours, 3), "share_of_copy": round(size / ours / copied, 3)}
        found["error"] = round(error, 5)
        if tokens <= SMALL[-1]:
            if size not in copy_of:
                copy_of[size] = copy_seconds(size)
            found |= {"copy_us": round(copy_of[size] * 1e6, 2), "copy_over_ours": round(copy_of[size] / ours, 3)}
        print(json.dumps(found), flush=True)
        for label, call in candidates(x, small[0]).items() if sweep else ():
            result = attempt(call, x, small[0])
            if result is None:
                continue
            error = float((result.float() - expected).abs().max() / expected.abs().max())
            seconds = seconds_each([partial(call, x, w) for w in small], 3)
            found = {"row": f"linear: {name}", "candidate": label, "us": round(seconds * 1e6, 2)}
            found |= {"speed_over_bf16": round(plain / seconds, 3), "share_of_copy": round(size / seconds / copied, 3)}
            print(json.dumps({**found, "error": round(error, 5)}), flush=True)
            if tokens > 1 and error < _MOST_ERROR:
                best = fastest.setdefault(kind, {}).setdefault(str(columns), {})
                if str(tokens) not in best or seconds < best[str(tokens)][0]:
                    best[str(tokens)] = seconds, json.loads(label)
    print(json.dumps({"row": "linear", "unit": "us", **microseconds}), flush=True)
    if choose is not None:
        choose.write_text(table_text(fastest))


def table_text(fastest: dict[str, dict[str, dict[str, tuple[float, dict[str, Any]]]]]) -> str:
    """Return the fastest candidates as JSON, a line for each number of tokens."""
    kinds = []
    for kind, widths in fastest.items():
        texts = []
        for width, best in widths.items():
            lines = ",\n".join(f'   "{count}": {json.dumps(tile)}' for count, (_, tile) in best.items())
            texts.append(f'  "{width}": {{\n{lines}\n  }}')
        kinds.append(f' "{kind}": {{\n' + ",\n".join(texts) + "\n }")
    return "{\n" + ",\n".join(kinds) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="int4,int8")
    parser.add_argument("--least", type=int, default=1, help="fewest tokens")
    parser.add_argument("--most", type=int, default=LARGE[-1], help="most tokens")
    parser.add_argument("--step", type=int, default=0, help="every so many tokens, in place of those of the table")
    parser.add_argument("--sweep", action="store_true", help="measure other kernels and tiles too")
    parser.add_argument(
        "--choose", type=Path, help="write the fastest kernels of a sweep, as `tuned.json`, to this file"
    )
    parser.add_argument("--workers", type=int, default=0, help="processes that compile kernels first")
    parser.add_argument("--share", type=int, help="compile this worker's share of the kernels, and exit")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which no row is begun")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"row": "linear", "ours": None, "why": "needs a GPU"}))
        return
    measured = cases(options.kinds.split(","), options.least, options.most, options.step)
    if options.share is not None:
        warm_up(measured, options.share, options.workers, sweep=options.sweep)
        return
    began = time.monotonic()
    command = [sys.executable, __file__, "--kinds", options.kinds]
    command += ["--least", str(options.least), "--most", str(options.most), "--step", str(options.step)]
    command += ["--workers", str(options.workers), *(["--sweep"] if options.sweep else [])]
    started = [subprocess.Popen([*command, "--share", str(share)]) for share in range(options.workers)]
    for process in started:
        process.wait()
    if started:
        print(json.dumps({"row": "linear: compiled", "seconds": round(time.monotonic() - began, 1)}), flush=True)
    limit = options.limit - (time.monotonic() - began)
    rows_of(measured, sweep=options.sweep, limit=limit, choose=options.choose)


if __name__ == "__main__":
    main()
