"""Bytes of weights, gradients and optimizer states on one rank, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable

from piledriver.engine.layout import Layout
from piledriver.models.config import ModelConfig
from piledriver.optim.adamw.quantise import block_size
from piledriver.plan.blocks.parameters import ParameterShape, Stage, parts_of
from piledriver.plan.blocks.per_model import answers_by_model
from piledriver.plan.blocks.setting import PILEDRIVER, Traits
from piledriver.plan.errors import PlanError
from piledriver.plan.memory.offloaded import offloaded_bytes
from piledriver.plan.memory.state_bytes import StateBytes, weight_size_of

OPTIMIZERS_KNOWN = ("adamw", "muon", "lion", "adamw8bit", "adamw_bf16", "adamw_split", "adamw_split_bf16", "sgd")


def state_bytes_of(shape: tuple[int, ...], optimizer: str, weight_size: int, *, is_table: bool = False) -> float:
    """Return the optimizer's bytes for each element of a parameter of this shape.

    >>> state_bytes_of((64, 64), "adamw", 4), state_bytes_of((64,), "adamw_bf16", 4)
    (8.0, 8.0)
    """
    matrix = len(shape) > 1
    if optimizer == "adamw":
        return 8.0
    if optimizer == "lion":
        return float(weight_size)
    if optimizer == "sgd":
        return 0.0
    if optimizer == "muon":
        return float(weight_size) if matrix and not is_table else 8.0
    if optimizer in ("adamw_split", "adamw_split_bf16"):
        low = 2.0 if weight_size == 2 else 0.0
        return low + (4.0 if optimizer.endswith("bf16") and matrix else 8.0)
    if optimizer == "adamw_bf16":
        return 4.0 if matrix else 8.0
    if optimizer == "adamw8bit":
        block = block_size(shape[-1]) if matrix else None
        return 8.0 if block is None else 2.0 + 8.0 / block
    raise PlanError(
        f"the states of optimizer {optimizer!r} are unknown", fix=f"plan with one of {', '.join(OPTIMIZERS_KNOWN)}"
    )


def bytes_of(
    shapes: Iterable[ParameterShape],
    layout: Layout,
    optimizer: str,
    traits: Traits = PILEDRIVER,
    *,
    of_blocks: bool = True,
) -> StateBytes:
    """Return the bytes of some parameters on one rank; offload streams those of blocks (`of_blocks`) only."""
    total = StateBytes()
    size = weight_size_of(layout)
    for one in shapes:
        full, shard = one.elements(layout), one.shard(layout)
        if traits.master_copy:
            total += _megatron(full, shard, layout, traits)
            continue
        owned = shard if layout.zero else full
        per = state_bytes_of(one.shape, optimizer, size, is_table="vocab" in one.axes or "positions" in one.axes)
        held = full if layout.zero < 3 else shard
        gradients = full if layout.zero < 2 else shard
        step = 4.0  # torch's step counter
        if layout.offloads:
            total += offloaded_bytes(one, layout, per, streams=layout.streams_parameters and of_blocks)
            continue
        total += StateBytes(
            weights=size * held, gradients=size * gradients, states=owned * per + step, elements=full, owned=owned
        )
    return total


def _megatron(full: float, shard: float, layout: Layout, traits: Traits) -> StateBytes:
    """16-bit weights, a gradient buffer, and fp32 masters with two moments (the distributed optimizer shards them)."""
    gradient = 4.0 if traits.fp32_gradients else 2.0
    owned = shard if layout.zero else full
    return StateBytes(weights=2 * full, gradients=gradient * full, states=12 * owned, elements=full, owned=owned)


def stage_states(
    config: ModelConfig, stage: Stage, layout: Layout, optimizer: str, traits: Traits = PILEDRIVER
) -> dict[str, StateBytes]:
    """Return the bytes of one block, of the embedding and of the output layer, as one stage holds them.

    In a model with dense blocks and blocks with experts, one block is the mean of the stage's blocks.
    """
    dense = dense_blocks(config, stage)
    # All that the bytes depend on.
    key = (
        *(stage.first, stage.last, dense, len(stage.blocks) if dense else 0, optimizer, traits),
        *(layout.zero, layout.tp, layout.ep, layout.cp, layout.dp_shard, layout.loss_parallel, layout.precision),
        layout.offload,
    )
    answers = _answers_of(config)
    found: dict[str, StateBytes] | None = answers.get(key)
    if found is None:
        found = answers[key] = _stage_states(config, stage, layout, optimizer, traits)
    return found


_answers_of = answers_by_model()


def _stage_states(
    config: ModelConfig, stage: Stage, layout: Layout, optimizer: str, traits: Traits
) -> dict[str, StateBytes]:
    parts = parts_of(config)
    block, dense = bytes_of(parts.block, layout, optimizer, traits), dense_blocks(config, stage)
    if dense:
        share = dense / len(stage.blocks)
        block = block.times(1 - share) + bytes_of(parts.dense, layout, optimizer, traits).times(share)
    ends: dict[str, StateBytes] = {"block": block}
    ends["embedding"] = (
        bytes_of(parts.embedding, layout, optimizer, traits, of_blocks=False) if stage.first else StateBytes()
    )
    ends["head"] = bytes_of(parts.head, layout, optimizer, traits, of_blocks=False) if stage.last else StateBytes()
    if parts.tied and stage.last and not stage.first:
        # The last stage borrows the embedding: a weight with a gradient, without states.
        table = next(one for one in parts.embedding if one.axes[0] == "vocab")
        borrowed = bytes_of([table], layout, "sgd")
        ends["head"] += StateBytes(weights=borrowed.weights, gradients=borrowed.gradients, elements=borrowed.elements)
    return ends


def stage_total(config: ModelConfig, stage: Stage, layout: Layout, optimizer: str) -> StateBytes:
    """Return the bytes of all parameters of one stage."""
    ends = stage_states(config, stage, layout, optimizer)
    return ends["block"].times(len(stage.blocks)) + ends["embedding"] + ends["head"]


def dense_blocks(config: ModelConfig, stage: Stage) -> int:
    """Return how many blocks of a stage are dense in a model whose other blocks have experts."""
    if config.moe is None or not config.moe.dense_layers:
        return 0
    return sum(not config.has_experts(layer) for layer in stage.blocks)
