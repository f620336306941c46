"""Peak rates of the device at hand: by datasheet, or measured if it is not in the table."""

from __future__ import annotations

import time
from functools import lru_cache

import torch

from piledriver.observe.flops import measured_peak, memory_bandwidth, peak_flops
from piledriver.observe.profile.module_tree import Roofline

_TYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


@lru_cache(maxsize=4)
def device_roofline(name: str, kind: str) -> Roofline:
    """Return the roofline of a device; a CPU and unknown devices are measured for a fraction of a second."""
    rates = {one: rate for one in _TYPES if (rate := peak_flops(name, getattr(torch, one))) is not None}
    bandwidth = memory_bandwidth(name)
    measured = not rates
    if measured:
        rates = {"float32": measured_peak(kind, torch.float32, size=1024, seconds=0.2)}
    if bandwidth is None:
        bandwidth = _copy_rate(kind)
    if rates.get("bfloat16") and torch.backends.cuda.matmul.allow_tf32:
        rates["float32"] = rates["bfloat16"] / 2
    return Roofline(rates, bandwidth, measured)


def _copy_rate(kind: str, size: int = 2**26) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.ones(size, dtype=torch.uint8, device=kind)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        target.copy_(source)
        if kind == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2 * size / (time.perf_counter() - begin))
    return best
