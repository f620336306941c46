"""Forward only: each stage of a rank runs all micro-batches, then the next stage does.

torch's V-shaped schedules, with neighbouring stages on one rank, cannot run without a backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piledriver.engine.pipeline_parallel.infer_shapes import Meta
from piledriver.engine.pipeline_parallel.microbatches import MicroBatch

Forward = Callable[[tuple[Tensor, ...], MicroBatch], Any]


def run_forward(
    stages: dict[int, Forward],
    microbatches: list[MicroBatch],
    outputs: list[tuple[Meta, ...]],
    rank_of: list[int],
    *,
    group: Any,
    device: torch.device,
    finish: Callable[[Any, int], object],
) -> None:
    """Run this rank's stages on every micro-batch; call `finish` with the last stage's output and its index."""
    ranks = [dist.get_global_rank(group, rank) for rank in rank_of]
    me, last = dist.get_rank(), len(rank_of) - 1
    here: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    sent: list[Any] = []
    for stage in sorted(stages):
        came = ranks[stage - 1] if stage else me
        goes = ranks[stage + 1] if stage < last else me
        later: list[Tensor] = []
        for number, micro in enumerate(microbatches):
            if stage == 0:
                inputs = micro.inputs
            elif came == me:
                inputs = here.pop((stage - 1, number))
            else:
                inputs = tuple(_received(meta, came, group, device) for meta in outputs[stage - 1])
            out = stages[stage](inputs, micro)
            if stage == last:
                finish(out, number)
                continue
            tensors = tuple(tensor.contiguous() for tensor in (out if isinstance(out, tuple | list) else (out,)))
            if goes == me:
                here[stage, number] = tensors
            elif goes == came:
                # That rank is still sending to this one: send once it is done.
                later.extend(tensors)
            else:
                sent.extend((dist.isend(tensor, goes, group=group), tensor) for tensor in tensors)
        sent.extend((dist.isend(tensor, goes, group=group), tensor) for tensor in later)
    for work, _ in sent:
        work.wait()


def _received(meta: Meta, source: int, group: Any, device: torch.device) -> Tensor:
    buffer = torch.empty(meta.shape, dtype=meta.dtype, device=device)
    dist.recv(buffer, source, group=group)
    return buffer
