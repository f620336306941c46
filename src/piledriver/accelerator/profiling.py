"""Profile a block on every rank, and write one trace file each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from piledriver.accelerator.options.handlers import ProfileKwargs
from piledriver.runtime.collectives.barrier import barrier
from piledriver.runtime.world import World


@contextmanager
def profiled(world: World, options: ProfileKwargs) -> Iterator[torch.profiler.profile]:
    """Run torch's profiler with the given options."""
    with options.build() as profiler:
        yield profiler
    if options.output_trace_dir is None:
        return
    folder = Path(options.output_trace_dir)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"profile_{world.rank}.json"))
    barrier(world, name="profile")
