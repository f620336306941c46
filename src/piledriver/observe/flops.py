"""How many floating-point operations a step does, and what part of the device's peak that is (MFU)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from piledriver.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class FlopCount:
    """The operations of one call."""

    total: int
    by_operator: Mapping[str, int]


def count_flops(step: Callable[[], Any]) -> FlopCount:
    """Run a step once and count its matrix multiplications, convolutions and attentions, forward and backward.

    Elementwise work is not counted, as everywhere where MFU is published; recomputation is, since it runs.

    >>> a = torch.ones(2, 3); count_flops(lambda: a @ torch.ones(3, 4)).total
    48
    """
    counter = FlopCounterMode(display=False)
    with counter:
        step()
    whole = counter.get_flop_counts().get("Global", {})
    return FlopCount(counter.get_total_flops(), {str(operator): int(count) for operator, count in whole.items()})


def peak_flops(device_name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """The vendor's dense peak of a device in operations per second, or None where the table does not know it.

    >>> peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA H200")
    True
    """
    known = [name for name in _table() if name.lower() in device_name.lower()]
    if not known:
        return None
    # The longest name that fits: `H100 PCIe` before `H100`.
    peak = _table()[max(known, key=len)].get(str(dtype).removeprefix("torch."))
    return None if peak is None else peak * 1e12


def measured_peak(device: torch.device | str, dtype: torch.dtype, *, size: int = 1024, seconds: float = 0.3) -> float:
    """What large matrix products reach on this device: the yardstick where there is no datasheet, such as a CPU."""
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    best = 0.0
    end = time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        begin = time.perf_counter()
        product = a @ b
        if product.device.type == "cuda":
            torch.cuda.synchronize(product.device)
        best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return best


def model_flops_utilisation(flops_per_step: float, seconds_per_step: float, peak: float, devices: int = 1) -> float:
    """The part of the peak that a step used: 0.5 is 50% MFU.

    >>> model_flops_utilisation(1e12, 0.01, peak=2e14)
    0.5
    """
    if seconds_per_step <= 0 or peak <= 0 or devices < 1:
        raise UsageError(f"cannot divide by {seconds_per_step} s, {peak} operations per second, {devices} devices")
    return flops_per_step / seconds_per_step / (peak * devices)


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, float]]:
    text = resources.files("piledriver.observe").joinpath("device_peaks.json").read_text(encoding="utf-8")
    devices: dict[str, dict[str, float]] = json.loads(text)["devices"]
    return devices
