"""Phases of one step on one rank: each with everything that is allocated at its fullest moment."""

from __future__ import annotations

from piledriver.plan.blocks.parameters import shard_ranks
from piledriver.plan.memory.in_flight import in_flight_after_a_backward
from piledriver.plan.memory.optimizer_workspace import optimizer_workspace, step_tensors
from piledriver.plan.memory.owners import at_rest, gathered_blocks, kept_activations, reduce_buffers
from piledriver.plan.memory.phases import Owner, Phase, Timeline, make_phase
from piledriver.plan.memory.rank import Rank
from piledriver.plan.memory.segments import stranded_bytes

Rest = tuple[Owner, ...]


def timeline_of_rank(rank: Rank) -> Timeline:
    """Return the memory of one step on a rank."""
    rest = at_rest(rank)
    phases = [_start(rank, rest), _forward(rank, rest)]
    if rank.last:
        phases.append(_loss(rank, rest))
    phases += [_backward(rank, rest, first=False), _backward(rank, rest, first=True)]
    if rank.first:
        phases.append(_embedding_backward(rank, rest))
    phases.append(_step(rank, rest))
    host = rank.block.host * rank.layers + rank.ends.host
    if rank.layout.offloads and rank.layout.tiers.steps_by_block:
        host += rank.layout.tiers.buffers * rank.layout.tiers.buffer_bytes
    if rank.layout.activation_offload:
        host += max(0, rank.layers - 1) * rank.cost.kept_bytes
    groups = sum(size > 1 for size in (rank.layout.tp, rank.layout.pp, rank.layout.cp, rank.layout.ep))
    groups += shard_ranks(rank.layout) > 1
    groups += (rank.layout.dp_replicate or 1) > 1
    peak = max(phases, key=lambda phase: phase.bytes)
    return Timeline(
        rank=rank.name,
        phases=tuple(phases),
        host=host,
        disk=rank.block.disk * rank.layers + rank.ends.disk,
        communicators=groups,
        peak=peak,
        pipeline_rank=rank.rank,
        stranded=_stranded(rank, phases, peak),
    )


def _stranded(rank: Rank, phases: list[Phase], peak: Phase) -> float:
    """Bytes that the allocator holds beside the peak."""
    if peak.name == "loss" and not rank.traits.chunked_loss:
        # Whole logits are larger than anything that the forward freed.
        return rank.loss.stranded + rank.cost.forward_workspace
    freed = [max((one.bytes for one in rank.cost.kept), default=0.0)]
    freed += [one.bytes for one in rank.loss.forward_peak] if rank.last else []
    table = 0.0
    if rank.config.tied and rank.first and rank.last and not rank.traits.copying_loss:
        table = max((one.bytes for one in rank.embedding.backward_peak), default=0.0)
    waiting = max(0, rank.layers - 2) * rank.cost_kept if rank.layout.activation_offload else 0.0
    ends = bool(rank.ends.elements)
    sizes = step_tensors(rank.config, rank.optimizer, rank.layout, ends=ends, layers=rank.layers)
    return stranded_bytes(phases, peak, freed=freed, table=table, in_step=sizes, waiting=waiting)


def _with_gradients(rest: Rest, gradients: float) -> list[Owner]:
    """Return what is at rest, and gradients where there are any."""
    return [*rest, Owner("gradients", "gradients", gradients)] if gradients else [*rest]


def _start(rank: Rank, rest: Rest) -> Phase:
    gradients = rank.all_gradients if rank.traits.master_copy else 0.0
    return make_phase("before the forward", _with_gradients(rest, gradients))


def _forward(rank: Rank, rest: Rest) -> Phase:
    in_flight, earlier = rank.fullest()
    owners = _with_gradients(rest, earlier)
    owners += kept_activations(rank, in_flight)
    owners += gathered_blocks(rank, 2)
    owners.append(Owner("workspace", "temporaries of a block's forward", rank.cost.forward_workspace))
    return make_phase("forward, last block", owners)


def _loss(rank: Rank, rest: Rest) -> Phase:
    in_flight, earlier = rank.fullest()
    owners = _with_gradients(rest, earlier)
    owners += kept_activations(rank, in_flight)
    owners += gathered_blocks(rank, 1)
    both = max(rank.loss.forward_peak, rank.loss.backward_peak, key=lambda many: sum(one.bytes for one in many))
    owners += [Owner("loss", one.name, one.bytes) for one in (*rank.loss.kept, *both)]
    return make_phase("loss", owners)


def _backward(rank: Rank, rest: Rest, *, first: bool) -> Phase:
    """The backward of the last block (all activations alive) or of the first one (most gradients alive).

    At its widest place, the MLP, the gradients of a block's other weights and of the embedding do not exist yet.
    """
    blocks = (rank.layers - 1 if first else 0) * rank.block.gradients
    gradients = blocks + rank.ends.gradients - rank.embedding_gradients + rank.gradients_at_mlp()
    alive, earlier = rank.fullest()
    if first:
        alive = in_flight_after_a_backward(rank.layout, rank.rank, rank.accumulation, len(rank.stages))
        alive, earlier = alive + 1.0 / max(rank.layers, 1), rank.earlier_gradients()
    owners = _with_gradients(rest, max(gradients, earlier))
    if rank.layout.activation_offload and rank.layers > 2:
        alive *= 1.7  # besides the block at work and the one that comes back, one that has just been used
    owners += kept_activations(rank, max(alive, 0.0))
    owners += gathered_blocks(rank, 2)
    owners += reduce_buffers(rank)
    owners.append(Owner("workspace", "temporaries of a block's backward", rank.cost.backward_workspace))
    if rank.layout.offloads:
        size = 2 * rank.weight_size if rank.accumulation > 1 else rank.weight_size
        owners.append(Owner("gradients", "gradients on their way to the host", size * rank.block.elements))
        if rank.layout.streams_parameters:
            both = 2 * rank.setting.itemsize * rank.block.elements
            owners.append(Owner("gathered parameters", "two blocks' weights on the device", both))
    if rank.accumulation > 1 and rank.layout.zero < 2:
        # A new gradient exists beside the sum that it is added to.
        owners.append(Owner("gradients", "gradients of one block", rank.block.gradients))
    return make_phase("backward, first block" if first else "backward, last block", owners)


def _embedding_backward(rank: Rank, rest: Rest) -> Phase:
    owners = _with_gradients(rest, rank.all_gradients)
    owners += kept_activations(rank, max(rank.in_flight - 1.0, 0.0))
    owners += gathered_blocks(rank, 0)
    owners += reduce_buffers(rank)
    if rank.config.tied and rank.last:
        # Beside the output layer's gradient of the same weight.
        owners += [Owner("gradients", one.name, one.bytes) for one in rank.embedding.backward_peak]
    return make_phase("backward, embedding", owners)


def _step(rank: Rank, rest: Rest) -> Phase:
    owners = _with_gradients(rest, rank.all_gradients)
    owners += optimizer_workspace(rank.config, rank.optimizer, rank.layout, rank.block, rank.ends, rank.layers)
    return make_phase("optimizer step", owners)
