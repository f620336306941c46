"""Uneven pipeline stages on two CPU processes whose speeds are 1 : 2: measured and predicted gain over equal stages.

`python benchmarks/plan_uneven.py` prints one JSON line. Control groups limit the processes to 0.4 and 0.8 of a core, in
periods much shorter than a micro-batch; below a whole core, so that neither waits for the other's core. Equal and
uneven stages take steps in turns, and the ratio is the median over pairs of steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from piledriver.engine.apply import apply
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.state import state_of
from piledriver.models import ModelConfig, Transformer
from piledriver.plan import Workload
from piledriver.plan.hardware.cluster import Cluster, Device
from piledriver.plan.hardware.here import detect_cluster
from piledriver.plan.prediction import predict
from piledriver.plan.search.candidates import Wishes
from piledriver.plan.search.choose import search_layouts

CONFIG = ModelConfig(vocab_size=256, dim=256, layers=12, heads=4, mlp_dim=704, max_positions=128)
MICRO_BATCHES, SEQUENCES = 8, 2
PERIOD = 10_000
"""Microseconds in which a process gets its share."""


class Quota:
    """A control group that gives a process a share of one core (Linux; needs the rights to make one)."""

    def __init__(self, name: str, share: float) -> None:
        root = Path("/sys/fs/cgroup")
        is_first_version = (root / "cpu").is_dir()
        self._group = (root / "cpu" if is_first_version else root) / name
        limit = int(share * PERIOD)
        files = {"cpu.cfs_period_us": f"{PERIOD}", "cpu.cfs_quota_us": f"{limit}"}
        try:
            self._group.mkdir(exist_ok=True)
            for file, value in files.items() if is_first_version else [("cpu.max", f"{limit} {PERIOD}")]:
                (self._group / file).write_text(value)
        except OSError as error:
            raise SystemExit(
                f"cannot limit processes by {self._group}: {error}. Fix: run it as root on Linux"
            ) from error

    def take(self, process: int) -> None:
        """Limit a process and its threads."""
        (self._group / "cgroup.procs").write_text(str(process))

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        self._group.rmdir()


def work(rank: int, folder: str, layouts: list[Layout], steps: int, answers: Any) -> None:
    """Time steps of each layout, in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    pipelines = []
    for layout in layouts:
        model = Transformer(CONFIG, seed=1)
        apply(model, make_mesh(layout, "cpu"), device=torch.device("cpu"))
        known = state_of(model)
        assert known is not None
        pipelines.append((model, known.pipeline))
    tokens = torch.randint(CONFIG.vocab_size, (MICRO_BATCHES * SEQUENCES, CONFIG.max_positions))
    dist.broadcast(tokens, 0)
    taken: list[list[float]] = [[] for _ in layouts]
    for step in range(steps + 1):
        for number, (model, pipeline) in enumerate(pipelines):
            dist.barrier()
            begun = time.perf_counter()
            pipeline.step(tokens, tokens)
            dist.barrier()
            if step:
                taken[number].append(time.perf_counter() - begun)
            model.zero_grad()
    if rank == 0:
        answers.put(taken)
    dist.barrier()
    dist.destroy_process_group()


def limited(shares: tuple[float, float]) -> Cluster:
    """Return two devices that have these shares of a core of this machine."""
    torch.set_num_threads(1)
    here = detect_cluster(2)
    first, second = (scaled(here.device, share) for share in shares)
    return replace(here, device=first, others=((1, second),))


def scaled(device: Device, share: float) -> Device:
    """Return a device at a share of its speed."""
    return replace(
        device,
        name=f"cpu-at-{share:g}",
        bandwidth=share * device.bandwidth,
        peaks={name: share * rate for name, rate in device.peaks.items()},
        measured={},
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shares", type=float, nargs=2, default=(0.4, 0.8), help="of a core, for each process")
    parser.add_argument("--steps", type=int, default=9)
    args = parser.parse_args()
    shares = tuple(args.shares)
    cluster = limited(shares)
    workload = Workload(config=CONFIG, length=CONFIG.max_positions, batch=MICRO_BATCHES * SEQUENCES)
    even = Layout(pp=2, microbatches=MICRO_BATCHES, compile=False)
    found = search_layouts(workload, cluster, Wishes(precisions=("fp32",), fixed=even, sequences=SEQUENCES))
    chosen = next(one for one in found.fitting if one.layout.stage_blocks is not None)
    plain = predict(workload, even, cluster, sequences=SEQUENCES)
    context = mp.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        layouts = [even, replace(even, stage_blocks=chosen.layout.stage_blocks)]
        quotas = [Quota(f"uneven-{rank}", share) for rank, share in enumerate(shares)]
        workers = [context.Process(target=work, args=(rank, folder, layouts, args.steps, answers)) for rank in range(2)]
        for worker, quota in zip(workers, quotas, strict=True):
            worker.start()
            quota.take(worker.pid)
        taken = answers.get(timeout=600)
        for worker, quota in zip(workers, quotas, strict=True):
            worker.join()
            quota.remove()
    ratio = statistics.median(first / second for first, second in zip(*taken, strict=True))
    said = plain.time.total / chosen.time.total
    print(
        json.dumps(
            {
                "row": "plan_uneven",
                "shares": list(shares),
                "blocks": list(chosen.layout.stage_blocks or ()),
                "even_seconds": round(statistics.median(taken[0]), 3),
                "uneven_seconds": round(statistics.median(taken[1]), 3),
                "measured_ratio": round(ratio, 3),
                "predicted_ratio": round(said, 3),
                "error": round(said / ratio - 1, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
