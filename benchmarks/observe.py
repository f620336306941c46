"""What watching a run costs a step of about 20 ms, with everything on: collectives, timers, tracker, monitor, leaks.

    python benchmarks/observe.py [--device cuda] [--seconds 2] [--rounds 6]

One process with gloo, or NCCL on a GPU; a step trains a stack of linear layers for about 20 ms and reduces eight
tensors. Rounds without and with everything in turn; the median of the ratios of neighbouring rounds. Time is the
process's processor time on a CPU, all threads included, and the wall on a GPU. The monitor samples once a round, more
often than its default. `start_ms` is what the first 24 steps cost more, once a run; `microseconds` are of each part
alone, for one step, from many calls in a row.
DeepSpeed's communication logger, which synchronises each call, is not installed here and not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from piledriver.observe.communication import CommunicationRecorder
from piledriver.observe.leaks.watch import LeakWatch
from piledriver.observe.monitor import SystemMonitor
from piledriver.observe.rank_log import RankLog
from piledriver.observe.timers import StepTimer
from piledriver.observe.trackers import TrackerHub, choose_trackers, make_trackers

COLLECTIVES, TARGET, WARM_UP = 8, 0.02, 24
Hook = Callable[[int], None]


class Loop:
    """A training step of about 20 ms on a device."""

    def __init__(self, device: str) -> None:
        self.device = device
        width, self.layers = (2048, 12) if device == "cuda" else (256, 8)
        self.model = nn.Sequential(*[nn.Linear(width, width) for _ in range(self.layers)]).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.tensors = [torch.zeros(4096, device=device) for _ in range(COLLECTIVES)]
        self.batch = torch.randn(64, width, device=device)
        for _ in range(20):  # grow the batch until a step takes its time
            self.step()
            seconds = min(self.seconds(2) for _ in range(2))
            if seconds >= 0.9 * TARGET:
                break
            rows = int(self.batch.shape[0] * min(4.0, max(1.1, TARGET / seconds)))
            self.batch = torch.randn(rows, width, device=device)

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.reduce()

    def reduce(self) -> None:
        """Reduce as a gradient reducer does: start all, then wait."""
        works = [dist.all_reduce(tensor, async_op=True) for tensor in self.tensors]
        for work in works:
            work.wait()

    def seconds(self, count: int, after: Hook = lambda _: None) -> float:
        self.synchronise()
        begin = self.now()
        for number in range(count):
            self.step()
            after(number)
        self.synchronise()
        return (self.now() - begin) / count

    def synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def now(self) -> float:
        return time.perf_counter() if self.device == "cuda" else time.process_time()


class Everything:
    """All that watches a run; `on` installs it for a block and yields what a loop calls after each step."""

    def __init__(self, loop: Loop, folder: str, every_s: float) -> None:
        self.loop, self.every_s = loop, every_s
        self.recorder = CommunicationRecorder()
        self.timer = StepTimer(torch.device(loop.device))
        self.leaks = LeakWatch()
        self.ranks = RankLog(folder, 0, 1)
        self.monitor = SystemMonitor(every_s=every_s, sink=self.ranks)
        self.hub = TrackerHub(
            make_trackers(choose_trackers(["jsonl"], logging_dir=folder), "cost", folder), is_main=True
        )
        self.hub.start(config={})
        self.count = 0

    @contextmanager
    def on(self) -> Iterator[Hook]:
        with self.recorder, self.monitor, self.leaks.attach(self.loop.optimizer), ExitStack() as stack:
            stack.enter_context(self.timer("step"))

            def after(_: int) -> None:
                self.count += 1
                self.log(stack)

            yield after

    def log(self, stack: ExitStack) -> None:
        stack.close()  # the step ends
        stack.enter_context(self.timer("step"))
        self.ranks.step(self.count, seconds=TARGET)
        self.hub.log({"loss": 1.0, "tokens_per_second": 1e5, **self.ranks.take()}, step=self.count)

    def parts(self, count: int = 400) -> dict[str, float]:
        """Microseconds of each part for one step."""
        inside = ExitStack()
        inside.enter_context(self.timer("step"))

        def per_step(call: Callable[[], Any], inside: AbstractContextManager[Any] | None = None) -> float:
            with inside or nullcontext():
                begin = time.process_time()
                for _ in range(count):
                    call()
                return 1e6 * (time.process_time() - begin) / count

        sample = per_step(self.monitor.look) * TARGET / 5.0  # at the interval of `piledriver train`
        self.monitor.look()
        found = {
            "collectives": per_step(self.loop.reduce, self.recorder) - per_step(self.loop.reduce),
            "timer, tracker": per_step(lambda: self.log(inside)),
            "monitor": sample,
            "leaks": per_step(self.leaks.step),
        }
        inside.close()
        return {name: round(value, 2) for name, value in found.items()}


def measure(device: str, seconds: float, rounds: int) -> dict[str, Any]:
    loop = Loop(device)
    plain: list[float] = []
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        everything = Everything(loop, folder, seconds)
        count = max(10, round(seconds / TARGET))
        before = loop.seconds(WARM_UP)
        with everything.on() as after:  # the first steps look at all live tensors twice, later ones hardly ever
            started = WARM_UP * (loop.seconds(WARM_UP, after) - before)
        for _ in range(rounds):
            plain.append(loop.seconds(count))
            with everything.on() as after:
                watched = loop.seconds(count, after)
            ratios += [watched / plain[-1]]
        ratios += [watched / plain[0]]
        parts = everything.parts()
        recorded = everything.recorder.summary()
        everything.hub.finish()
    assert recorded, "nothing was recorded"
    return {
        "row": "observe",
        "ours": {
            "step_ms": round(statistics.median(plain) * 1e3, 3),
            "slower": round(statistics.median(ratios) - 1, 5),
            "start_ms": round(started * 1e3, 1),
            "noise": round((max(plain) - min(plain)) / statistics.median(plain), 5),
            "microseconds": parts,
            "slower_by_parts": round(sum(parts.values()) * 1e-6 / TARGET, 5),
            "all_reduce_us": round(1e6 * (recorded[0].seconds or 0.0), 1),
        },
        "device": device,
        "collectives_per_step": COLLECTIVES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29653", "RANK": "0", "WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    print(json.dumps(measure(args.device, args.seconds, args.rounds)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
