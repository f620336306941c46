"""Uneven inputs: ranks that run out of data shadow the collectives of the others until the last one is done."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from piledriver.engine.data_parallel.ddp import DDPReducer
from piledriver.engine.state import state_of


@contextmanager
def join_uneven_inputs(things: Iterable[Any]) -> Iterator[None]:
    """Run torch's `Join` over the DDP reducers of prepared models, and over anything else that is joinable."""
    things = list(things)
    joinables = [joinable for joinable in map(_joinable, things) if joinable is not None]
    if not joinables:
        layouts = [known.mesh.layout for thing in things if isinstance(thing, nn.Module) and (known := state_of(thing))]
        found = f"the model has {layouts[0]}" if layouts else "nothing given is a prepared model"
        warnings.warn(
            f"join_uneven_inputs needs a prepared model that torch DDP reduces, and {found}: it has no effect. Fix: "
            "give every rank the same number of batches, or use Layout(reducer='ddp')",
            UserWarning,
            stacklevel=5,
        )
        yield
        return
    with Join(joinables, enable=True, throw_on_early_termination=False):
        yield


def _joinable(thing: Any) -> Joinable | None:
    if not isinstance(thing, nn.Module):
        return thing if isinstance(thing, Joinable) else None
    known = state_of(thing)
    return known.reducer.ddp if known is not None and isinstance(known.reducer, DDPReducer) else None
