"""A leak of 1 MiB, a file or a thread a step is named with its line within 50 steps; what stops growing is not."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piledriver.observe.leaks.census import take_census
from piledriver.observe.leaks.leak import Leak
from piledriver.observe.leaks.lines import FRAMES
from piledriver.observe.leaks.watch import LeakWatch

STEPS = 50
MIB = 2**20


class Loop:
    """A small model, and ways to leak: the line of each ends in `# LEAK` and its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: list[Any] = []
        self.model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.total = torch.zeros(())
        self.wide = torch.ones(MIB // 4, requires_grad=True)
        self.seen: list[int] = []
        self.end = threading.Event()
        self.descriptors: list[int] = []

    def train(self) -> None:
        self.model(torch.randn(4, 32)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> None:
        self.kept.append(torch.zeros(MIB // 4))  # LEAK tensors

    def graph(self) -> None:
        self.total = self.total + (self.wide * torch.ones(MIB // 4)).mean()  # LEAK graph

    def losses(self) -> None:
        self.kept.append((self.wide * torch.ones(MIB // 4)).sum())  # LEAK losses

    def cycle(self) -> None:
        value = self.wide * 2  # LEAK cycle
        value.register_hook(lambda gradient: value * gradient)

    def module_hook(self) -> None:
        scale = torch.zeros(MIB // 4)  # LEAK module_hook
        self.model[0].register_forward_hook(lambda *_: self.seen.append(scale.numel()))

    def host(self) -> None:
        self.kept.append(bytearray(MIB))  # LEAK host

    def files(self) -> None:
        self.kept.append(open(self.folder / "file", "w"))  # LEAK files

    def descriptors_only(self) -> None:
        self.descriptors.append(os.open(self.folder / "file", os.O_RDONLY | os.O_CREAT))  # LEAK descriptors_only

    def threads(self) -> None:
        threading.Thread(target=self.end.wait, daemon=True).start()  # LEAK threads

    def close(self) -> None:
        self.end.set()
        for file in self.kept:
            if hasattr(file, "close"):
                file.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        gc.collect()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    gc.collect()
    made = Loop(tmp_path)
    yield made
    made.close()


def watched(loop: Loop, body: Callable[[], None], steps: int = STEPS) -> list[Leak]:
    said: list[str] = []
    with LeakWatch(report=said.append) as watch:
        for _ in range(steps):
            loop.train()
            body()
            watch.step()
    assert said == [str(leak) for leak in watch.leaks]
    return watch.leaks


@pytest.mark.parametrize(
    ("name", "kind", "holder"),
    [
        ("tensors", "tensors", "`kept` of a Loop"),
        ("graph", "graph", "`total` of a Loop"),
        ("losses", "graph", "`kept` of a Loop"),
        ("cycle", "hook", "Loop.cycle.<locals>.<lambda>"),
        ("module_hook", "hook", "Loop.module_hook.<locals>.<lambda>"),
        ("host", "host memory", ""),
        ("files", "files", ""),
        ("descriptors_only", "files", ""),
        ("threads", "threads", ""),
    ],
)
def test_a_leak_is_named_with_its_line(loop: Loop, name: str, kind: str, holder: str) -> None:
    lines = Path(__file__).read_text().splitlines()
    expected = next(number for number, line in enumerate(lines, 1) if line.endswith(f"# LEAK {name}"))
    leaks = watched(loop, getattr(loop, name))
    assert [(leak.kind, leak.line.number) for leak in leaks] == [(kind, expected)]
    (leak,) = leaks
    assert leak.step <= STEPS
    assert leak.line.file == __file__
    assert holder in leak.held_by
    if kind in ("files", "threads"):
        assert leak.per_step == pytest.approx(1, abs=0.1)
    elif name in ("tensors", "module_hook", "host"):
        assert 0.9 * MIB < leak.per_step < 1.2 * MIB
    assert f"{__file__}:{expected}" in str(leak)
    assert "\n" not in str(leak)


@pytest.mark.parametrize(("name", "begins"), [("host", 301), ("tensors", 305), ("files", 310), ("threads", 303)])
def test_a_leak_that_begins_late_is_named_within_as_many_steps(loop: Loop, name: str, begins: int) -> None:
    blocks = [bytearray(MIB) for _ in range(200)]
    del blocks[::2]  # memory that a leak fills before the process grows
    with LeakWatch(report=lambda line: None) as watch:
        for step in range(1, begins + STEPS):
            if step >= begins:
                getattr(loop, name)()
            watch.step()
    lines = Path(__file__).read_text().splitlines()
    assert [lines[leak.line.number - 1].rsplit("# LEAK ", 1)[-1] for leak in watch.leaks] == [name]


def test_what_stops_growing_or_is_bounded_is_no_leak(loop: Loop) -> None:
    recent: deque[torch.Tensor] = deque(maxlen=8)
    losses: list[float] = []
    warming: list[bytearray] = []

    def body() -> None:
        recent.append(torch.zeros(MIB // 4))  # bounded
        losses.append(float(torch.rand(())))  # small
        if len(warming) < 24:
            warming.append(bytearray(MIB))  # a cache that is full after 24 steps: enough for a suspicion
        if len(losses) % 10 == 0:
            loop.kept.clear()
        loop.kept.append(torch.zeros(MIB // 4))  # an epoch's results

    assert watched(loop, body, 2 * STEPS) == []


def test_what_the_watch_itself_allocates_is_not_blamed_on_the_loop() -> None:
    tracemalloc.start(FRAMES)
    try:
        kept = [take_census() for _ in range(3)]
    finally:
        tracemalloc.stop()
    # The line itself makes a small list; the counts that it holds are not its own.
    sizes = [size for line, size in kept[-1].python_bytes.items() if "take_census()" in str(line)]
    assert sum(sizes) < 4096


def test_it_attaches_to_an_optimizer_and_leaves_it(loop: Loop) -> None:
    with LeakWatch(report=lambda line: None).attach(loop.optimizer) as watch:
        for _ in range(STEPS):
            loop.tensors()
            loop.train()
        assert [leak.kind for leak in watch.leaks] == ["tensors"]
    count = watch._steps
    loop.train()
    assert watch._steps == count == STEPS
