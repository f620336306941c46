"""Floating-point operations of a step, and their share of the peak of the device (MFU)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from piledriver.core.errors import UsageError


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]


CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Formulas of the fused attention on a CPU, which torch's registry leaves out."""


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Operations of one call."""

    total: int
    by_operator: Mapping[str, int]


def count_flops(step: Callable[[], Any]) -> FlopCount:
    """Run a step once and count its matrix multiplications, convolutions and attentions, forward and backward.

    Elementwise operations are not counted, as is usual for MFU; recomputed ones are.

    >>> a = torch.ones(2, 3); count_flops(lambda: a @ torch.ones(3, 4)).total
    48
    """
    counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    with counter:
        step()
    whole = counter.get_flop_counts().get("Global", {})
    return FlopCount(counter.get_total_flops(), {str(operator): int(count) for operator, count in whole.items()})


def peak_flops(device_name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """Return the dense peak of a device by its datasheet, in operations per second, or None if it is not in the table.

    >>> peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA H200")
    True
    """
    known = [name for name in _table() if name.lower() in device_name.lower()]
    if not known:
        return None
    # The longest match: `H100 PCIe` before `H100`.
    peak = _table()[max(known, key=len)].get(str(dtype).removeprefix("torch."))
    return None if peak is None else peak * 1e12


def measured_peak(device: torch.device | str, dtype: torch.dtype, *, size: int = 1024, seconds: float = 0.3) -> float:
    """Return the throughput of large matrix products, for devices without a datasheet, such as a CPU."""
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
    """Return the share of the peak that a step used: 0.5 is 50% MFU.

    >>> model_flops_utilisation(1e12, 0.01, peak=2e14)
    0.5
    """
    if seconds_per_step <= 0 or peak <= 0 or devices < 1:
        raise UsageError(
            f"MFU of {seconds_per_step} s, peak {peak} and {devices} devices is undefined", fix="give positive values"
        )
    return flops_per_step / seconds_per_step / (peak * devices)


def memory_bandwidth(device_name: str) -> float | None:
    """Return the memory bandwidth of a device by its datasheet, in bytes per second, or None if it is not known.

    >>> memory_bandwidth("NVIDIA H200") / 1e12
    4.8
    """
    known = [name for name in _file()["bandwidth"] if name.lower() in device_name.lower()]
    return float(_file()["bandwidth"][max(known, key=len)]) * 1e9 if known else None


def _table() -> dict[str, dict[str, float]]:
    devices: dict[str, dict[str, float]] = _file()["devices"]
    return devices


@lru_cache(maxsize=1)
def _file() -> dict[str, Any]:
    text = resources.files("piledriver.observe").joinpath("device_peaks.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
