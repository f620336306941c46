"""Profile a block on every process, and leave one trace file each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from piledriver.accelerator.options import ProfileKwargs

if TYPE_CHECKING:
    from piledriver.accelerator.accelerator import Accelerator


@contextmanager
def profiled(accelerator: Accelerator, options: ProfileKwargs) -> Iterator[torch.profiler.profile]:
    """torch's profiler with the options given."""
    with options.build() as profiler:
        yield profiler
    if options.output_trace_dir is None:
        return
    folder = Path(options.output_trace_dir)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"profile_{accelerator.process_index}.json"))
    accelerator.wait_for_everyone()
