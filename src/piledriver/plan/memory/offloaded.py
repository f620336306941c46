"""Bytes of one parameter by tier, where the optimizer or the weights are offloaded: as `engine/offload` places them."""

from __future__ import annotations

from piledriver.engine.layout import Layout
from piledriver.engine.offload.apply import streams_shards
from piledriver.plan.blocks.parameters import ParameterShape, shard_ranks
from piledriver.plan.memory.state_bytes import StateBytes, weight_size_of

_NEARER = {"disk": "host", "host": "device", "device": "device"}


def offloaded_bytes(one: ParameterShape, layout: Layout, per: float, *, streams: bool) -> StateBytes:
    """Return the bytes of one parameter; `per` are those of the optimizer's states for each element.

    What a share leaves lives one tier nearer. Gradients leave the device as they arrive: the timeline counts those of
    one block.
    """
    full, shard = one.elements(layout), one.shard(layout)
    owned = shard if layout.zero else full
    counted = StateBytes(elements=full, owned=owned)
    several = shard_ranks(layout) > 1
    if several and layout.zero == 3 and layout.streams_parameters and not streams_shards(layout):
        # torch's policy: the shards on the host are the masters, those of the ends too.
        size = weight_size_of(layout)
        return counted + StateBytes(host=owned * (2 * size + per))
    tiers, is_matrix = layout.tiers, len(one.shape) > 1
    found = {"device": 0.0, "host": 0.0, "disk": 0.0}
    _put(found, owned * (4 + per), tiers.optimizer, tiers.optimizer_share, is_matrix=is_matrix)
    if tiers.gradients != "step":
        _put(found, 4.0 * owned, tiers.gradients, 1.0, is_matrix=is_matrix)
    states, weights = found["device"], 0.0
    found["device"] = 0.0
    held = full if layout.zero < 3 else shard
    is_half = is_matrix and layout.precision not in ("fp32", "fp16")
    if not streams:
        # Shards and rows of tensor parallelism stay as wide as they were.
        is_whole = not (layout.zero == 3 and several) and one.local(layout) == one.shape
        weights = held * (2 if is_half and is_whole else weight_size_of(layout))
    elif is_half or (several and layout.zero in (1, 2)):
        # A source in the compute dtype; else the master itself is the source. With zero 1 and 2 it has all rows.
        _put(found, held * (2.0 if is_half else 4.0), tiers.parameters, tiers.parameters_share, is_matrix=is_matrix)
        weights = found["device"]
    return counted + StateBytes(weights=weights, states=states, host=found["host"], disk=found["disk"])


def _put(found: dict[str, float], size: float, tier: str, share: float, *, is_matrix: bool) -> None:
    """Add bytes to a tier, and what a share leaves to the next nearer one; vectors are never on disk."""
    if tier == "disk" and not is_matrix:
        tier, share = "host", 1.0
    found[tier] += share * size
    found[_NEARER[tier]] += (1 - share) * size
