"""Temporaries of an optimizer step: gathered rows, buckets of stochastic rounding, Newton-Schulz iterations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from piledriver.engine.layout import Layout
from piledriver.engine.shards.owned_rows import BUCKET_BYTES
from piledriver.models.config import ModelConfig
from piledriver.optim.muon import MATRICES_TOGETHER
from piledriver.plan.blocks.parameters import parts_of, shard_ranks
from piledriver.plan.memory.phases import Owner
from piledriver.plan.memory.state_bytes import StateBytes, weight_size_of

ROUNDING = "stochastic rounding of a bucket"
NEWTON_SCHULZ = "Newton-Schulz iterations"


def optimizer_workspace(
    config: ModelConfig, optimizer: str, layout: Layout, block: StateBytes, ends: StateBytes, layers: int
) -> Iterator[Owner]:
    """Yield the temporaries of one rank's optimizer step on `layers` blocks and the ends."""
    owned = layers * block.owned + ends.owned
    largest = ends.owned if layers else owned
    if layout.zero in (1, 2) and shard_ranks(layout) > 1:
        yield Owner("communication buffers", "gathered rows", 2.0 * max(BUCKET_BYTES, 4 * ends.elements / 2))
    if layout.offloads and not layout.tiers.steps_by_block:
        # A master weight comes to the device in fp32 and is cast there.
        largest_master = 4.0 * _largest_owned(config, layout, ends=bool(ends.elements), layers=layers)
        yield Owner("workspace", "largest master weight on the device", largest_master)
    if layout.has_bf16_weights and optimizer in ("adamw", "muon", "lion", "sgd"):
        # fp32 copies of a bucket of weights and gradients, and the 64-bit numbers that its noise is hashed from.
        yield Owner("workspace", ROUNDING, 40.0 * min(owned, max(1 << 26, largest)))
    if optimizer == "lion" and not layout.has_bf16_weights:
        yield Owner("workspace", "updates of all matrices", 4.0 * layers * block.owned)
    if optimizer == "adamw8bit":
        # The compiled update of the largest parameter: both moments in fp32.
        yield Owner("workspace", "moments of a parameter in fp32", 8.0 * largest)
    if optimizer == "muon" and layers:
        yield Owner("workspace", NEWTON_SCHULZ, newton_schulz_bytes(config, layout, layers))


def step_tensors(config: ModelConfig, optimizer: str, layout: Layout, *, ends: bool, layers: int) -> list[float]:
    """Return the bytes of single tensors that an optimizer step allocates: masters, updates, batches of matrices."""
    if layout.offloads:
        return [] if layout.tiers.steps_by_block else [4.0 * _largest_owned(config, layout, ends=ends, layers=layers)]
    matrices = [one for one in parts_of(config).block if len(one.shape) > 1]
    if optimizer == "lion" and not layout.has_bf16_weights:
        owned = [one.shard(layout) if layout.zero else one.elements(layout) for one in matrices]
        return [4.0 * size for size in owned for _ in range(layers)]
    if optimizer == "muon" and layers:
        together = min(MATRICES_TOGETHER, layers)
        return [float(weight_size_of(layout) * together * math.prod(one.shape)) for one in matrices]
    return []


def _largest_owned(config: ModelConfig, layout: Layout, *, ends: bool, layers: int) -> float:
    """Return the elements of the largest parameter that a rank's optimizer steps on."""
    parts = parts_of(config)
    held = [*(parts.block if layers else ()), *((*parts.embedding, *parts.head) if ends else ())]
    return max((one.shard(layout) if layout.zero else one.elements(layout) for one in held), default=0.0)


def newton_schulz_bytes(config: ModelConfig, layout: Layout, layers: int) -> float:
    """Return the bytes of Muon's largest moment.

    Matrices of one shape are stacked in batches, whole on every rank. While a batch is stacked, its momenta exist in
    their own dtype and in 16 bits. While it is iterated on, the stack exists with an iterate, the next one and two
    products, or with one iterate and three products. Nothing of a batch is left when the next begins.
    """
    size = weight_size_of(layout)
    by_shape: dict[tuple[int, ...], int] = {}
    for one in parts_of(config).block:
        if len(one.shape) > 1:
            by_shape[one.shape] = by_shape.get(one.shape, 0) + layers
    largest = 0.0
    for shape, count in by_shape.items():
        elements = float(min(MATRICES_TOGETHER, count) * math.prod(shape))
        product = 2.0 * elements * min(shape[-2:]) / max(shape[-2:])
        stacking = (size + 2) * elements
        largest = max(largest, stacking, 6 * elements + 2 * product, 4 * elements + 3 * product)
    return largest
