"""Undo what the engine attached to a model: reducers, pipeline calls, watchers and offloaded weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from piledriver.engine.data_parallel.sync_buffers import unsync_buffers
from piledriver.engine.lost_ranks import unwatch_forward
from piledriver.engine.marks import LAID_OUT
from piledriver.engine.offload.apply import undo_offload


def detach(model: nn.Module) -> None:
    """Average no longer, and keep nothing in host memory but the model. Parameters that are sharded stay so."""
    known = model.__dict__.pop(LAID_OUT, None)
    if known is not None and known.reducer is not None:
        known.reducer.release()
    if known is not None and known.pipeline is not None:
        call: Any = model.forward
        call.let_go()
    unwatch_forward(model)
    unsync_buffers(model)
    undo_offload(model)
    model.__dict__.pop("zero_grad", None)
    for parameter in model.parameters():
        parameter.__dict__.pop("optimizer_shard", None)
