"""Owners of a rank's memory: weights and states at rest, buffers of pipelines, gathers and reductions, activations."""

from __future__ import annotations

from piledriver.engine.shards.owned_rows import BUCKET_BYTES
from piledriver.plan.blocks.parameters import shard_ranks, stages_by_rank
from piledriver.plan.memory.phases import Owner
from piledriver.plan.memory.rank import Rank

# cuBLAS workspaces, which torch allocates.
_LIBRARY_BYTES = 0.075 * 2**30


def at_rest(rank: Rank) -> tuple[Owner, ...]:
    """Return what is allocated between steps."""
    layers = rank.layers
    return (
        Owner("weights", "weights of blocks", layers * rank.block.weights),
        Owner("weights", "weights of embedding and output", rank.ends.weights),
        Owner("optimizer states", f"{rank.optimizer} states", layers * rank.block.states + rank.ends.states),
        Owner("workspace", "library workspaces", _LIBRARY_BYTES if rank.kind == "cuda" else 0.0),
        *_received(rank),
    )


def _received(rank: Rank) -> tuple[Owner, ...]:
    """Return a pipeline's buffers for what other ranks send: one for each micro-batch of a step, kept between steps.

    Those of activations become the kept inputs of a stage's first block while a micro-batch is in flight.
    """
    if rank.layout.pp == 1 or not rank.traits.stage_buffers:
        return ()
    own = stages_by_rank(rank.layout)[rank.rank]
    inputs = sum(number > 0 and number - 1 not in own for number in own)
    gradients = sum(number < rank.layout.stages - 1 and number + 1 not in own for number in own)
    waiting = max(0.0, rank.accumulation - rank.in_flight)
    size = rank.border_bytes
    return (
        Owner("communication buffers", "activations from the stage before", inputs * waiting * size),
        Owner("communication buffers", "gradients from the next stage", gradients * rank.accumulation * size),
    )


def gathered_blocks(rank: Rank, blocks: int) -> list[Owner]:
    """Return what zero 3 gathers: blocks in the compute dtype, the copy that the collective fills, and the root's.

    A pipeline keeps a stage gathered from its first backward to its last.
    """
    if rank.layout.zero != 3 or shard_ranks(rank.layout) == 1:
        return []
    if blocks > 1:
        blocks = min(rank.layers, blocks - 1 + max(1, rank.layout.prefetch))
    if rank.layout.pp > 1 and rank.accumulation > 1:
        blocks = max(blocks, rank.layers)
    size = rank.setting.itemsize
    block = rank.block.elements * size
    return [
        Owner("gathered parameters", f"{blocks} gathered blocks", blocks * block),
        Owner("communication buffers", "all-gather output", block * (1 + 1 / shard_ranks(rank.layout))),
        Owner("gathered parameters", "gathered embedding and output", rank.ends.elements * size),
    ]


def reduce_buffers(rank: Rank) -> list[Owner]:
    """Return the buffers of a data-parallel reduction of gradients."""
    layout = rank.layout
    if layout.zero == 3 and shard_ranks(layout) > 1:
        # Gradients in the compute dtype, then fp32 input and output of the reduce-scatter.
        size = rank.setting.itemsize
        block = rank.block.elements
        return [
            Owner("gradients", "gradients of a gathered block", block * size),
            Owner("communication buffers", "reduce-scatter input", block * 4),
        ]
    ranks = (layout.dp_replicate or 1) * (layout.dp_shard or 1) * layout.cp
    if ranks == 1:
        return []
    bucket = max(BUCKET_BYTES, rank.weight_size * rank.block.elements / 3)
    return [Owner("communication buffers", "gradient buckets", 2.0 * bucket)]


def kept_activations(rank: Rank, share: float) -> list[Owner]:
    """Return the kept activations of `share` micro-batches: by tensor, over all blocks."""
    if not share:
        return []
    scale = share * rank.layers * rank.kept_by_block / max(rank.cost_kept, 1.0)
    found = [Owner("kept activations", name, scale * size) for name, size in _kept_tensors(rank)]
    if rank.first:
        found.append(Owner("kept activations", "tokens", share * sum(one.bytes for one in rank.embedding.kept)))
    if rank.layout.pp > 1 and rank.traits.stage_buffers:
        # Their backward starts from them.
        outputs = sum(not stage.last for stage in rank.stages) * share * rank.border_bytes
        found.append(Owner("kept activations", "outputs of stages", outputs))
    return found


def _kept_tensors(rank: Rank) -> list[tuple[str, float]]:
    if rank.brief:
        return [(f"what {rank.layers} blocks keep", rank.cost_kept)]
    return [(f"{one.name} of {rank.layers} blocks", one.bytes) for one in rank.cost.kept]
