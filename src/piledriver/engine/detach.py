"""Undo what the engine attached to a model: reducers, pipeline calls, hooks and offloaded weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from piledriver.engine.data_parallel import unsync_buffers
from piledriver.engine.faults.lost_ranks import unwatch_forward
from piledriver.engine.fused.undo import unfuse
from piledriver.engine.offload import undo_offload
from piledriver.engine.state import pop_state


def detach(model: nn.Module) -> None:
    """Remove the engine's hooks and state from a model. Sharded parameters stay sharded."""
    known = pop_state(model)
    if known is None:
        return
    if known.reducer is not None:
        known.reducer.release()
    if known.pipeline is not None:
        call: Any = model.forward
        call.release()
    unwatch_forward(model)
    unsync_buffers(model)
    undo_offload(model)
    unfuse(model)
    model.__dict__.pop("zero_grad", None)
    for parameter in model.parameters():
        parameter.__dict__.pop("optimizer_shard", None)
