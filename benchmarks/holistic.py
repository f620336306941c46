"""Where the device's time went, by this package and by Holistic Trace Analysis, on the same traces.

    python -m pip install HolisticTraceAnalysis
    python benchmarks/holistic.py profile/traces/rank_0.json.gz ...

Traces are those that `piledriver profile` keeps, or of any `torch.profiler`. Compared from the first kernel to the
last: computing, not computing (copies and collectives alone), and idle. Prints one JSON line for each trace and exits
with 1 where a figure differs by more than 2% of the time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("HTA_DISABLE_NS_ROUNDING", "1")  # it drops the nanoseconds otherwise

from piledriver.observe.profile.wall import split_wall
from piledriver.observe.trace.attribution import Attribution
from piledriver.observe.trace.chrome import read_trace

LIMIT = 0.02


def ours(path: str) -> dict[str, float]:
    trace = read_trace(path)
    window = (trace.kernels[0].start, max(one.end for one in trace.kernels))
    wall = split_wall(trace, Attribution(trace), window, main_thread=0)
    computing, idle = wall.kernels["compute"], wall.kernels["none"]
    return {"total": wall.total, "computing": computing, "not_computing": wall.total - computing - idle, "idle": idle}


def theirs(path: str) -> dict[str, float]:
    from hta.trace_analysis import TraceAnalysis

    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, os.path.basename(path))
        os.symlink(os.path.abspath(path), copy)
        found = TraceAnalysis(trace_files={0: copy}, trace_dir=folder)
        row = found.get_temporal_breakdown(visualize=False).iloc[0]
    names = {"total": "kernel_time", "computing": "compute_time", "not_computing": "non_compute_time"}
    return {name: float(row[f"{column}(us)"]) / 1e6 for name, column in (names | {"idle": "idle_time"}).items()}


def compare(path: str) -> dict[str, Any]:
    mine, other = ours(path), theirs(path)
    difference = max(abs(mine[name] - other[name]) for name in mine) / other["total"]
    rounded = [{name: round(value, 9) for name, value in one.items()} for one in (mine, other)]
    return {
        "row": "holistic",
        "trace": path,
        "ours": rounded[0],
        "theirs": rounded[1],
        "difference": round(difference, 6),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    rows = [compare(path) for path in parser.parse_args().traces]
    for row in rows:
        print(json.dumps(row))
    return int(any(row["difference"] > LIMIT for row in rows))


if __name__ == "__main__":
    sys.exit(main())
