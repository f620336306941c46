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
MASTER = "largest master weight on the device"


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
        yield Owner("workspace", MASTER, 4.0 * largest_owned(config, layout, ends=bool(ends.elements), layers=layers))
    if layout.has_bf16_weights and optimizer in ("adamw", "muon", "lion", "sgd"):
        # fp32 copies of a bucket of weights and gradients, and the 64-bit numbers that its noise is hashed from.
        yield Owner("workspace", ROUNDING, 40.0 * min(owned, max(1 << 26, largest)))
    if optimizer == "lion" and not layout.has_bf16_weights:
        yield Owner("workspace", "updates of all matrices", 4.0 * layers * block.owned)
    if optimizer == "adamw8bit":
        # The compiled update of the largest parameter: both moments in fp32.
        yield Owner("workspace", "moments of a parameter in fp32", 8.0 * largest)
    if optimizer == "muon" and layers:
        yield Owner("workspace", "Newton-Schulz iterations", newton_schulz_bytes(config, layout, layers))


def largest_owned(config: ModelConfig, layout: Layout, *, ends: bool, layers: int) -> float:
    """Return the elements of the largest parameter that a rank's optimizer steps on."""
    parts = parts_of(config)
    held = [*(parts.block if layers else ()), *((*parts.embedding, *parts.head) if ends else ())]
    return max((one.shard(layout) if layout.zero else one.elements(layout) for one in held), default=0.0)


def newton_schulz_bytes(config: ModelConfig, layout: Layout, layers: int) -> float:
    """Return the bytes of Muon's largest batch of matrices: the momenta, an iterate and the next one, two products.

    Matrices of one shape are iterated on together, whole on every rank.
    """
    largest = 0.0
    for one in parts_of(config).block:
        if len(one.shape) < 2:
            continue
        many = min(MATRICES_TOGETHER, layers) * math.prod(one.shape[:-2])
        short, long = sorted(one.shape[-2:])
        iterates = (weight_size_of(layout) + 2 + 2) * short * long
        largest = max(largest, many * (iterates + 2 * 2 * short * short))
    return largest
