"""Plan the training of any `nn.Module` with an example input: ZeRO stages and micro-batches, from traces.

The module is traced on fake tensors for two batch sizes, which gives what grows with the batch and what does not. Only
data parallelism is searched: the other axes need a model whose structure is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.blocks import blocks_of
from piledriver.engine.layout import Layout
from piledriver.plan.blocks.torch_private import tree_flatten, tree_unflatten
from piledriver.plan.blocks.trace import TracedCost, trace_module
from piledriver.plan.errors import PlanError
from piledriver.plan.hardware.cluster import HEADROOM, Cluster
from piledriver.plan.hardware.parse import parse_hardware
from piledriver.plan.memory.states import state_bytes_of
from piledriver.plan.time.links import Axis, collective_seconds
from piledriver.plan.time.rates import Efficiency

_GIB = 2**30
# The context of the device, libraries, and what the allocator holds beside tensors.
_CONTEXT_BYTES, _RESERVED_SHARE = 0.9 * _GIB, 0.05


@dataclass(frozen=True, kw_only=True)
class ModulePlan:
    """A data-parallel layout of a module with its prediction; the others are in `others`, fastest first."""

    layout: Layout
    micro_batch: int
    accumulation: int
    weights: float
    gradients: float
    states: float
    kept: float
    """Bytes that a micro-batch keeps for the backward."""
    gathered: float
    seconds: float
    """Of one optimizer step."""
    batch: int
    capacity: float
    others: tuple[ModulePlan, ...] = ()

    @property
    def memory(self) -> float:
        """Bytes of one device at the peak."""
        tensors = self.weights + self.gradients + self.states + self.kept + self.gathered
        return tensors * (1 + _RESERVED_SHARE) + _CONTEXT_BYTES

    @property
    def fits(self) -> bool:
        """Whether it fits a device, with headroom."""
        return self.memory <= self.capacity * (1 - HEADROOM)

    @property
    def samples_per_second(self) -> float:
        """Samples of all devices in a second."""
        return self.batch / self.seconds


def plan_module(
    module: nn.Module,
    *example: Any,
    batch: int,
    hardware: str | Cluster = "here",
    optimizer: str = "adamw",
    loss: Callable[[Any], Tensor] | None = None,
    **named: Any,
) -> ModulePlan:
    """Return the fastest data-parallel layout that fits; `example` is a micro-batch, samples along its first dimension.

    `batch` counts the samples of one step over all devices. Raises `PlanError` if nothing fits.

    >>> made = plan_module(nn.Linear(64, 64), torch.ones(4, 64), batch=64, hardware="2xh100")
    >>> made.layout.zero, made.fits
    (0, True)
    """
    cluster = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    costs = _Costs(module, example, named, loss)
    mine, rest = divmod(batch, cluster.count)
    if rest or mine == 0:
        raise PlanError(f"a batch of {batch} on {cluster.count} devices", fix=f"use {max(mine, 1) * cluster.count}")
    sizes = [size for size in range(1, mine + 1) if mine % size == 0 and (size & (size - 1) == 0 or size == mine)]
    made = [
        _predicted(costs, Layout(zero=zero).on(cluster.count), cluster, size, mine // size, batch, optimizer)
        for zero in ((0, 1, 2, 3) if cluster.count > 1 else (0,))
        for size in sizes
    ]
    fitting = sorted((one for one in made if one.fits), key=lambda one: (one.seconds, one.layout.zero))
    if not fitting:
        nearest = min(made, key=lambda one: one.memory)
        missing = (nearest.memory - nearest.capacity * (1 - HEADROOM)) / _GIB
        raise PlanError(
            f"{type(module).__name__} is {missing:.1f} GiB too large for {cluster.name}: the nearest is "
            f"{nearest.layout!r} with micro-batches of {nearest.micro_batch}",
            fix="use more or larger devices, smaller samples, or optimizer='adamw8bit'",
        )
    best, *others = fitting
    return ModulePlan(**{**vars(best), "others": tuple(others)})


class _Costs:
    """What a module costs for a micro-batch of any size: traced for two, and extended by a line."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, loss: Any) -> None:
        leaves, self.shape = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        if not tensors:
            raise PlanError("the example has no tensor with a batch dimension", fix="give a micro-batch of real inputs")
        rows = tensors[0].shape[0]
        self.traced: list[tuple[int, TracedCost]] = []
        for size in (2, 4):
            resized = [_resized(leaf, rows, size) for leaf in leaves]
            given, named = tree_unflatten(resized, self.shape)
            self.traced.append((size, trace_module(module, *given, loss=loss, **named)))
        self.shapes = [tuple(one.shape) for one in module.parameters() if one.requires_grad]
        self.bytes = float(sum(one.numel() * one.element_size() for one in module.parameters()))
        trained = [one for one in module.parameters() if one.requires_grad]
        self.trained = float(sum(one.numel() for one in trained))
        self.itemsize = trained[0].element_size() if trained else 4
        blocks = [sum(p.nbytes for p in block.parameters()) for block in blocks_of(module).values()]
        self.largest = float(max(blocks, default=self.bytes))

    def of(self, name: str, size: int) -> float:
        """Return a figure of the trace for a micro-batch of `size`."""
        (low, first), (high, second) = self.traced
        slope = (getattr(second, name) - getattr(first, name)) / (high - low)
        return float(getattr(first, name) + slope * (size - low))


def _resized(leaf: Any, rows: int, size: int) -> Any:
    """Return a tensor whose first dimension is the batch with another number of samples, without its values."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != rows:
        return leaf
    return torch.empty((size, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")


def _predicted(
    costs: _Costs, layout: Layout, cluster: Cluster, size: int, rounds: int, batch: int, optimizer: str
) -> ModulePlan:
    ranks, zero, device = cluster.count, layout.zero, cluster.slowest
    states = sum(state_bytes_of(shape, optimizer, costs.itemsize) * _elements(shape) for shape in costs.shapes)
    gradients = costs.trained * costs.itemsize
    share = device.efficiency
    compute = costs.of("matmul_flops", size) / (device.peak("fp32") * share["matmul"])
    compute += costs.of("attention_flops", size) / (device.peak("fp32") * share["attention"])
    compute = max(compute, costs.of("bytes_moved", size) / (device.bandwidth * share["memory"]))
    launches = costs.traced[0][1].kernels * Efficiency().launch if device.kind == "cuda" else 0.0
    step = (3 * gradients + 2 * states + 2 * costs.bytes) / (device.bandwidth * share["memory"])
    axis, link = Axis(ranks, 1), Efficiency()
    if zero == 3:
        moved = collective_seconds("all-gather", costs.bytes, axis, cluster, link)
        moved = 2 * rounds * moved + collective_seconds("reduce-scatter", gradients, axis, cluster, link)
    else:
        kind = "all-reduce" if zero < 2 else "reduce-scatter"
        moved = collective_seconds(kind, gradients, axis, cluster, link)
    exposed = collective_seconds("all-gather", costs.bytes, axis, cluster, link) if zero in (1, 2) else 0.0
    busy = rounds * max(compute, launches)
    # Communication hides behind the backward, two thirds of the time.
    exposed += max(0.1 * moved, moved - 2 / 3 * busy)
    return ModulePlan(
        layout=layout,
        micro_batch=size,
        accumulation=rounds,
        weights=costs.bytes / (ranks if zero == 3 else 1),
        gradients=gradients / (ranks if zero >= 2 and (zero == 3 or rounds == 1) else 1),
        states=states / (ranks if zero else 1),
        kept=costs.of("kept_bytes", size),
        gathered=3 * costs.largest if zero == 3 else 2 * 25 * 2**20 if ranks > 1 else 0.0,
        seconds=busy + step / (ranks if zero else 1) + exposed,
        batch=batch,
        capacity=device.memory if not cluster.others else cluster.smallest_memory,
    )


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
