"""Uneven pipeline stages on two CPU processes whose speeds are 1 : 2: measured and predicted gain over equal stages.

`python benchmarks/plan_uneven.py` prints one JSON line. A process is limited to a share of one core: it is stopped
while it has used more CPU time than its share, as a quota of the kernel would.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from dataclasses import replace
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

CONFIG = ModelConfig(vocab_size=256, dim=192, layers=12, heads=4, mlp_dim=512, max_positions=128)
MICRO_BATCHES, SEQUENCES = 8, 1
# A process that waits may save up this much of its quota, in seconds.
_SAVED = 0.02


class Quota(threading.Thread):
    """Keeps processes at shares of a core, by their CPU time."""

    def __init__(self, shares: dict[int, float]) -> None:
        super().__init__(daemon=True)
        self.shares, self.over = shares, False

    def run(self) -> None:
        """Stop and continue the processes until `over`."""
        last = time.perf_counter()
        used = {pid: _cpu_seconds(pid) for pid in self.shares}
        budget, stopped = dict.fromkeys(self.shares, 0.0), dict.fromkeys(self.shares, False)
        while not self.over:
            time.sleep(0.002)
            now = time.perf_counter()
            for pid, share in self.shares.items():
                spent = _cpu_seconds(pid)
                budget[pid] = min(_SAVED, budget[pid] + share * (now - last) - (spent - used[pid]))
                used[pid] = spent
                if (budget[pid] < 0) != stopped[pid]:
                    stopped[pid] = not stopped[pid]
                    os.kill(pid, signal.SIGSTOP if stopped[pid] else signal.SIGCONT)
            last = now
        for pid in self.shares:
            os.kill(pid, signal.SIGCONT)


def _cpu_seconds(pid: int) -> float:
    # The CPU clock of another process, as clock_getcpuclockid makes it.
    return time.clock_gettime(~pid << 3 | 2)


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
    """Return two devices that are shares of one core of this machine."""
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
    parser.add_argument("--shares", type=float, nargs=2, default=(0.25, 0.5))
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    cluster = limited(tuple(args.shares))
    workload = Workload(config=CONFIG, length=CONFIG.max_positions, batch=MICRO_BATCHES * SEQUENCES)
    even = Layout(pp=2, microbatches=MICRO_BATCHES, compile=False)
    found = search_layouts(workload, cluster, Wishes(precisions=("fp32",), fixed=even, sequences=SEQUENCES))
    chosen = next(one for one in found.fitting if one.layout.stage_blocks is not None)
    plain = predict(workload, even, cluster, sequences=SEQUENCES)
    context = mp.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        layouts = [even, replace(even, stage_blocks=chosen.layout.stage_blocks)]
        workers = [context.Process(target=work, args=(rank, folder, layouts, args.steps, answers)) for rank in range(2)]
        for worker in workers:
            worker.start()
        quota = Quota({worker.pid or 0: share for worker, share in zip(workers, args.shares, strict=True)})
        quota.start()
        taken = answers.get(timeout=600)
        quota.over = True
        quota.join()
        for worker in workers:
            worker.join(timeout=30)
    seconds = [statistics.median(times) for times in taken]
    ratio, said = seconds[0] / seconds[1], plain.time.total / chosen.time.total
    print(
        json.dumps(
            {
                "shares": list(args.shares),
                "blocks": list(chosen.layout.stage_blocks or ()),
                "even seconds": round(seconds[0], 3),
                "uneven seconds": round(seconds[1], 3),
                "measured ratio": round(ratio, 3),
                "predicted ratio": round(said, 3),
                "error": round(said / ratio - 1, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
