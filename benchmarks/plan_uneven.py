"""Uneven pipeline stages on two CPU processes whose speeds are 1 : 2: measured and predicted gain over equal stages.

`python benchmarks/plan_uneven.py` prints one JSON line. The slow process computes every block as often as it is slower,
forward and backward: its speed does not depend on a scheduler or on other work of the machine. Equal and uneven stages
take steps in turns, and the ratio is the median over pairs of steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

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


def slow_down(block: nn.Module, times: int) -> None:
    """Make a block compute its forward and its backward `times` times; the further results are thrown away."""
    plain = block.forward

    def forward(x: Tensor, *args: Any, **named: Any) -> Any:
        copies = []
        if torch.is_grad_enabled():
            for _ in range(times - 1):
                again = x.detach().requires_grad_()
                copies.append((again, _tensor(plain(again, *args, **named))))
        found = plain(x, *args, **named)
        if copies:
            parameters = [one for one in block.parameters() if one.requires_grad]

            def repeat(gradient: Tensor) -> None:
                for source, out in copies:
                    torch.autograd.grad(out, [source, *parameters], gradient)

            _tensor(found).register_hook(repeat)
        return found

    block.forward = forward  # type: ignore[method-assign]


def _tensor(found: Any) -> Tensor:
    first: Tensor = found if isinstance(found, Tensor) else found[0]
    return first


def work(rank: int, folder: str, layouts: list[Layout], steps: int, times: tuple[int, int], answers: Any) -> None:
    """Time steps of each layout, in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    pipelines = []
    for layout in layouts:
        model = Transformer(CONFIG, seed=1)
        apply(model, make_mesh(layout, "cpu"), device=torch.device("cpu"))
        for block in model.blocks.values():
            slow_down(block, times[rank])
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


def limited(times: tuple[int, int]) -> Cluster:
    """Return two devices that are this many times slower than one core of this machine."""
    torch.set_num_threads(1)
    here = detect_cluster(2)
    first, second = (scaled(here.device, 1 / each) for each in times)
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
    parser.add_argument("--times", type=int, nargs=2, default=(2, 1), help="how often each process computes a block")
    parser.add_argument("--steps", type=int, default=9)
    args = parser.parse_args()
    times = tuple(args.times)
    cluster = limited(times)
    workload = Workload(config=CONFIG, length=CONFIG.max_positions, batch=MICRO_BATCHES * SEQUENCES)
    even = Layout(pp=2, microbatches=MICRO_BATCHES, compile=False)
    found = search_layouts(workload, cluster, Wishes(precisions=("fp32",), fixed=even, sequences=SEQUENCES))
    chosen = next(one for one in found.fitting if one.layout.stage_blocks is not None)
    plain = predict(workload, even, cluster, sequences=SEQUENCES)
    context = mp.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        layouts = [even, replace(even, stage_blocks=chosen.layout.stage_blocks)]
        settings = (folder, layouts, args.steps, times, answers)
        workers = [context.Process(target=work, args=(rank, *settings)) for rank in range(2)]
        for worker in workers:
            worker.start()
        taken = answers.get(timeout=600)
        for worker in workers:
            worker.join(timeout=30)
    ratio = statistics.median(first / second for first, second in zip(*taken, strict=True))
    said = plain.time.total / chosen.time.total
    print(
        json.dumps(
            {
                "times": list(times),
                "blocks": list(chosen.layout.stage_blocks or ()),
                "even seconds": round(statistics.median(taken[0]), 3),
                "uneven seconds": round(statistics.median(taken[1]), 3),
                "measured ratio": round(ratio, 3),
                "predicted ratio": round(said, 3),
                "error": round(said / ratio - 1, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
