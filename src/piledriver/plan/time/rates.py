"""Seconds of operators on a device: datasheet rates times an efficiency for each kernel class, or measured rates.

The efficiency of a matrix product falls with its tiles: a product whose output has few tiles leaves units idle, and one
that is shallow spends its time on loads and stores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from piledriver.plan.blocks.operators import Operator
from piledriver.plan.hardware.cluster import Device

# Edge of the output tile of a matrix product, and the depth at which a tile's prologue costs as much as its body.
_TILE = (128, 128)
_DEPTH = 160.0
# Products in fp8 reach this much less of their peak than those in bf16 of theirs; their casts are operators.
_FP8_SHARE = 0.88
# Products in fp32 do without tensor cores, whose data comes too slowly: they come nearer to their peak. Attention does
# not: it multiplies in three passes of tf32.
_FP32_SHARE, _TF32_PASSES = 0.85, 3
# Products in fp8 that write fp32, as the gradients of fp32 weights, run at this share of those that write bf16.
_FP32_OUTPUT_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Factors on a device's own efficiencies that one framework reaches, and its costs on the host."""

    matmul: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    network: float = 1.0
    launch: float = 9e-6
    """Seconds of the host for one kernel."""
    step: float = 0.0
    """Seconds of the host for one optimizer step."""


@dataclass(frozen=True)
class Rates:
    """Seconds of operators on one device in one precision."""

    device: Device
    precision: str
    efficiency: Efficiency = field(default_factory=Efficiency)
    _known: dict[tuple[int, int, int, int, str], float] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, operator: Operator) -> float:
        """Return the seconds of one operator."""
        if operator.kind == "matmul":
            return self._matmul(operator)
        if operator.kind == "attention":
            return self._attention(operator)
        return self.move(operator.bytes)

    def total(self, operators: tuple[Operator, ...] | list[Operator]) -> float:
        """Return the seconds of operators that run one after the other."""
        return sum(map(self.seconds, operators))

    def move(self, size: float) -> float:
        """Return the seconds of a kernel that moves this many bytes."""
        rate = measured_rate(self.device, "memory")
        if rate is None:
            rate = self.device.bandwidth * self.device.efficiency["memory"]
        return size / (rate * self.efficiency.memory)

    def _matmul(self, operator: Operator) -> float:
        precision = operator.precision or ("bf16" if self.precision == "fp8" else self.precision)
        shape = operator.shape or (8192, 8192, 8192)
        key = (*shape, operator.groups, precision)
        rate = self._known.get(key)
        if rate is None:
            rate = self._known[key] = self._matmul_rate(shape, operator.groups, precision)
        busy = operator.flops / rate if operator.flops else 0.0
        return max(busy, operator.bytes / (self.device.bandwidth * self.device.efficiency["memory"]))

    def _matmul_rate(self, shape: tuple[int, int, int], groups: int, precision: str) -> float:
        table = self.device.measured.get("matmul")
        if precision == "fp8-fp32" and not (isinstance(table, Mapping) and precision in table):
            return _FP32_OUTPUT_SHARE * self._matmul_rate(shape, groups, "fp8")
        peak = self.device.peak(precision)
        share = self.device.efficiency["matmul"] * self.efficiency.matmul
        if precision == "fp8":
            share *= _FP8_SHARE
        elif precision == "fp32" and self.device.kind == "cuda":
            share = max(share, _FP32_SHARE * self.efficiency.matmul)
        if isinstance(table, Mapping) and precision in table:
            return _interpolated(table[precision], shape, groups, self.device.tile) * self.efficiency.matmul
        return peak * share * occupancy(shape, groups, self.device.tile)

    def _attention(self, operator: Operator) -> float:
        rate = measured_rate(self.device, "attention")
        if rate is None:
            peak = self.device.peak("bf16" if self.precision in ("fp8", "auto") else self.precision)
            if self.precision == "fp32":
                peak = max(peak, self.device.peaks.get("tf32", 0.0) / _TF32_PASSES)
            rate = peak * self.device.efficiency["attention"]
        if operator.shape is not None:
            # Narrow heads spend more of their time on softmax, and short rows on the edges of the mask.
            _, context, width = operator.shape
            rate *= min(1.0, math.sqrt(width / 128)) * context / (context + 96)
        return max(operator.flops / (rate * self.efficiency.attention), self.move(operator.bytes))


def occupancy(shape: tuple[int, int, int], groups: int, units: int) -> float:
    """Return the share of a device's units that the tiles of a product keep busy, times the share of useful depth.

    >>> occupancy((8192, 8192, 8192), 1, 132) > 0.9 > occupancy((512, 512, 4096), 1, 132)
    True
    """
    m, n, k = shape
    tiles = math.ceil(m / _TILE[0]) * math.ceil(n / _TILE[1]) * groups
    waves = math.ceil(tiles / units)
    full = tiles / (waves * units)
    if waves == 1:
        # Libraries split the depth where the output has few tiles, at some cost.
        full = max(full, 0.5 * min(1.0, full * max(1.0, k / 1024)))
    # Rows that are not a multiple of 16 bytes keep tensor cores from loading them whole.
    aligned = 0.15 if (n | k | m) % 2 else 1.0 if (n | k) % 8 == 0 else 0.6
    edge = aligned * (m / (math.ceil(m / _TILE[0]) * _TILE[0])) * (n / (math.ceil(n / _TILE[1]) * _TILE[1]))
    return full * edge * k / (k + _DEPTH)


def measured_rate(device: Device, name: str) -> float | None:
    """Return a rate that `calibrate` measured, None without it."""
    rate = device.measured.get(name)
    return float(rate) if isinstance(rate, int | float) else None


def best_measured(device: Device, precision: str) -> float:
    """Return the largest measured rate of matrix products, 0 where none was measured."""
    table = device.measured.get("matmul")
    rows = table.get(precision, []) if isinstance(table, Mapping) else []
    return max((float(row[3]) for row in rows), default=0.0)


def _interpolated(points: object, shape: tuple[int, int, int], groups: int, units: int) -> float:
    """Return the rate of a shape from measured products: the nearest ones' rate over their occupancy, times its own."""
    m, n, k = shape
    best: list[tuple[float, float]] = []
    assert isinstance(points, list)
    for pm, pn, pk, rate in points:
        distance = sum(abs(math.log2(max(a, 1) / b)) for a, b in ((m, pm), (n, pn), (k, pk)))
        best.append((distance, rate / occupancy((pm, pn, pk), 1, units)))
    best.sort()
    near = best[:4]
    weights = [1 / (0.25 + distance) ** 2 for distance, _ in near]
    scaled = sum(w * rate for w, (_, rate) in zip(weights, near, strict=True)) / sum(weights)
    return scaled * occupancy(shape, groups, units)
