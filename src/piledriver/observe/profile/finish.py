"""Turn what a stopped profiler recorded into a `RankProfile`, and keep the trace."""

from __future__ import annotations

import os
import tempfile

from piledriver.observe.profile.collect import StepProfiler, process_rank, trace_path
from piledriver.observe.profile.rank import RankProfile, rank_profile
from piledriver.observe.profile.roofline import device_roofline
from piledriver.observe.trace.chrome import read_trace


def finish_rank(profiler: StepProfiler, folder: str | None = None) -> RankProfile:
    """Analyse what a stopped profiler recorded; with a folder, keep the trace there, for Perfetto."""
    rank = process_rank()
    with tempfile.TemporaryDirectory() as scratch:
        path = os.path.join(scratch, "trace.json")
        profiler.export_chrome_trace(path)
        trace = read_trace(path)
        if folder is not None:
            target = trace_path(folder, rank)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            profiler.export_chrome_trace(target)
    notes = profiler.notes
    return rank_profile(trace, notes, rank=rank, roofline=device_roofline(notes.device_name, notes.device))
