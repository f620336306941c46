"""Undo what the engine attached to a model: reducers, pipeline calls, watchers and offloaded weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from piledriver.engine.data_parallel.sync_buffers import share_no_statistics
from piledriver.engine.lost_ranks import watch_no_longer
from piledriver.engine.marks import LAID_OUT
from piledriver.engine.offload.apply import bring_back


def forget(model: nn.Module) -> None:
    """Average no longer, and keep nothing in host memory but the model. Parameters that are sharded stay so."""
    known = model.__dict__.pop(LAID_OUT, None)
    if known is not None and known.averager is not None:
        known.averager.release()
    if known is not None and known.pipeline is not None:
        call: Any = model.forward
        call.let_go()
    watch_no_longer(model)
    share_no_statistics(model)
    bring_back(model)
    model.__dict__.pop("zero_grad", None)
    for parameter in model.parameters():
        parameter.__dict__.pop("own_part", None)
