"""What watching a run costs a step of about 20 ms, with everything on: collectives, timers, tracker, monitor, leaks.

    python benchmarks/observe.py [--device cuda] [--seconds 0.5] [--rounds 60]

One process with gloo, or NCCL on a GPU; a step trains a stack of linear layers for about 20 ms and reduces eight
tensors. Rounds without and with everything in turn, which goes first in turn as well: the median of the differences
of neighbouring rounds, and the interval that holds that median 95 times in 100 (by resampling). Time is the process's
processor time on a CPU, all threads included, and the wall on a GPU. The monitor samples every 5 s, more rarely than a
round: a sample is measured alone, and its share of a step added to the difference. `start_ms` is what the first 24
steps cost more, once a run. `microseconds` are of each part, one call after each real step: computing has emptied the
caches by then, and a call in a tight loop costs a fraction of that.
DeepSpeed's communication logger, which synchronises each call, is not installed here and not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from piledriver.observe import profile_step
from piledriver.observe.communication import CommunicationRecorder
from piledriver.observe.communication.interception import ignore
from piledriver.observe.leaks.watch import LeakWatch
from piledriver.observe.monitor import SystemMonitor
from piledriver.observe.rank_log import RankLog
from piledriver.observe.timers import StepTimer
from piledriver.observe.trackers import TrackerHub, choose_trackers, make_trackers
from piledriver.observe.trackers.jsonl import _line

COLLECTIVES, TARGET, WARM_UP = 8, 0.02, 24
Hook = Callable[[float], None]


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

    def seconds(self, count: int, after: Hook | None = None, timer: StepTimer | None = None) -> float:
        self.synchronise()
        begin = self.now()
        if after is None or timer is None:
            for _ in range(count):
                self.step()
        else:
            for _ in range(count):
                with timer("step"):
                    self.step()
                after(TARGET)
        self.synchronise()
        return (self.now() - begin) / count

    def synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def now(self) -> float:
        return time.perf_counter() if self.device == "cuda" else time.process_time()


class Everything:
    """All that watches a run; `on` installs it for a block and yields what a loop calls after each step."""

    def __init__(self, loop: Loop, folder: str) -> None:
        self.loop = loop
        self.recorder = CommunicationRecorder()
        self.timer = StepTimer(torch.device(loop.device))
        self.leaks = LeakWatch()
        self.ranks = RankLog(folder, 0, 1)
        self.monitor = SystemMonitor(every_s=5, sink=self.ranks)
        self.hub = TrackerHub(
            make_trackers(choose_trackers(["jsonl"], logging_dir=folder), "cost", folder), is_main=True
        )
        self.hub.start(config={})
        self.count = 0

    @contextmanager
    def on(self) -> Iterator[Hook]:
        with self.leaks.attach(self.loop.optimizer):
            yield self.after

    def after(self, begun: float) -> None:
        """What a loop does after a step: time it, count it, log it."""
        self.count += 1
        self.ranks.step(self.count, seconds=begun)
        self.hub.log({"loss": 1.0, "tokens_per_second": 1e5, **self.ranks.take()}, step=self.count)

    def parts(self, count: int) -> dict[str, float]:
        """Microseconds of each part for one step, called between real steps."""
        lines = _Lines()
        calls: dict[str, Callable[[], Any]] = {
            "nothing": lambda: None,
            "timer": self._timed,
            "tracker": lambda: self.after(TARGET),
            "monitor": self.monitor.look,
            "lines": lines.make,
        }
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(count):
            for name, call in calls.items():
                taken[name].append(self._after_a_step(call))
        clock = statistics.median(taken.pop("nothing"))
        found = {name: statistics.median(values) - clock for name, values in taken.items()}
        # A look at the counters is due at few steps: the mean.
        found["leaks"] = statistics.fmean(self._after_a_step(self.leaks.step) for _ in range(4 * count)) - clock
        found["monitor"] *= TARGET / 5.0  # at the interval of `piledriver train`
        found["collectives"] = self._heard(count) * TARGET / 10.0  # at the recorder's interval
        found["tracker's thread"] = found.pop("lines") / lines.COUNT
        return {name: round(value, 1) for name, value in found.items()}

    def _after_a_step(self, call: Callable[[], Any]) -> float:
        self.loop.step()
        self.loop.synchronise()
        begin = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - begin)

    def _heard(self, count: int) -> float:
        """Microseconds that the recorder adds to the collectives that it looks at in a row."""
        taken: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * count):
            self.loop.step()
            if turn % 2:
                self.recorder.look()
            begin = time.perf_counter()
            self.loop.reduce()
            taken[turn % 2 > 0].append(1e6 * (time.perf_counter() - begin))
            ignore(self.recorder)
        return 32 / COLLECTIVES * (statistics.median(taken[True]) - statistics.median(taken[False]))

    def _timed(self) -> None:
        with self.timer("step"):
            pass


class _Lines:
    """The lines that the tracker's thread writes at a time."""

    COUNT = 25

    def __init__(self) -> None:
        self.descriptor = os.open(os.devnull, os.O_WRONLY)
        self.entry = (1.0, 1, {"loss": 1.0, "tokens_per_second": 1e5}, {})

    def make(self) -> None:
        os.write(self.descriptor, b"".join([_line(self.entry) for _ in range(self.COUNT)]))


def profiled(loop: Loop) -> dict[str, Any]:
    """What share of the peak has an owner, and how far the parts of the wall time sum to it."""
    rank = profile_step(loop.step, loop.model, [loop.optimizer], warm_up=1, steps=3).ranks[0]
    return {
        "row": "profile",
        "named_share": round(rank.memory[0].named_share, 5),
        "sum_over_wall": round(sum(rank.seconds.values()) / rank.wall_seconds, 5),
        "peak_over_allocator": round(rank.memory[0].bytes / rank.facts["peak_bytes"], 5)
        if rank.facts["peak_bytes"]
        else None,
        "device": loop.device,
    }


def measure(loop: Loop, seconds: float, rounds: int, calls: int) -> dict[str, Any]:
    plain: list[float] = []
    differences: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        everything = Everything(loop, folder)
        count = max(10, round(seconds / TARGET))
        before = loop.seconds(WARM_UP)
        everything.recorder.__enter__()  # it rests after some calls, so that rounds without it are as they would be
        with everything.on() as after:  # the first steps look at all live tensors twice, later ones hardly ever
            started = WARM_UP * (loop.seconds(WARM_UP, after, everything.timer) - before)
            loop.seconds(120, after, everything.timer)  # the leak watch looks more rarely after its first steps

        def watched() -> float:
            with everything.on() as after:
                return loop.seconds(count, after, everything.timer)

        for turn in range(rounds):
            first = loop.seconds(count) if turn % 2 else watched()
            second = watched() if turn % 2 else loop.seconds(count)
            without, with_all = (first, second) if turn % 2 else (second, first)
            plain.append(without)
            differences.append(with_all - without)
        parts = everything.parts(calls)
        recorded = everything.recorder.summary()
        everything.recorder.__exit__()
        everything.hub.finish()
    assert recorded, "nothing was recorded"
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(differences, k=len(differences))) for _ in range(2000))
    step, added = statistics.median(plain), 1e6 * statistics.median(differences) + parts["monitor"]
    return {
        "row": "observe",
        "ours": {
            "step_ms": round(step * 1e3, 3),
            "added_us": round(added, 1),
            "added_us_interval": [round(1e6 * end + parts["monitor"], 1) for end in (medians[50], medians[-51])],
            "slower": round(1e-6 * added / step, 5),
            "start_ms": round(started * 1e3, 1),
            "noise": round((max(plain) - min(plain)) / step, 5),
            "microseconds": parts,
            "slower_by_parts": round(sum(parts.values()) * 1e-6 / TARGET, 5),
            "all_reduce_us": round(1e6 * (recorded[0].seconds or 0.0), 1),
        },
        "device": loop.device,
        "collectives_per_step": COLLECTIVES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a round")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--parts", type=int, default=64, help="calls of each part that are timed")
    args = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29653", "RANK": "0", "WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    loop = Loop(args.device)
    print(json.dumps(measure(loop, args.seconds, args.rounds, args.parts)), flush=True)
    print(json.dumps(profiled(loop)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
