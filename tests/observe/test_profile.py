"""The profile of steps: wall time that sums, FLOPs that equal torch's, memory with owners, one page."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import flop_registry

from piledriver.observe import Report, profile_step, region
from piledriver.observe.flops import count_flops
from piledriver.observe.memory.peak import UNNAMED
from piledriver.observe.profile.document_boundaries import BoundarySightings, DocumentBoundaries
from piledriver.observe.trace.chrome import HostEvent, read_trace
from piledriver.observe.trace.intervals import Intervals, intersect, length, subtract, union
from piledriver.observe.trace.operators import operator_flops
from tests.observe.small_models import SmallModel, closed_form_flops

BATCH, LENGTH, STEPS = 2, 16, 3


@dataclass
class Profiled:
    report: Report
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], Any]
    seconds: float
    folder: Path


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str = "cpu") -> Callable[[], Any]:
    ids = torch.randint(0, 64, (BATCH, LENGTH), device=device)

    def step() -> None:
        with region("loader"):
            time.sleep(0.004)
        loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with region("checkpoint"):
            time.sleep(0.002)
        time.sleep(0.003)

    return step


@pytest.fixture(scope="module", params=[False, True], ids=["kept", "recomputed"])
def profiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    folder = tmp_path_factory.mktemp("profile")
    model = SmallModel(recompute=request.param)
    optimizer = torch.optim.AdamW(model.parameters())
    step = make_step(model, optimizer)
    times: list[float] = []

    def timed() -> None:
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)

    report = profile_step(timed, model, [optimizer], steps=STEPS, folder=str(folder))
    return Profiled(report, model, optimizer, step, sum(times[-STEPS:]), folder)


def test_the_wall_is_the_sum_of_its_causes(profiled: Profiled) -> None:
    rank = profiled.report.ranks[0]
    assert sum(rank.seconds.values()) == pytest.approx(rank.wall_seconds, rel=0.02)
    assert rank.wall_seconds >= profiled.seconds  # the window holds all steps, timed outside of the trace
    assert rank.seconds["loader"] >= 0.004 * STEPS
    assert rank.seconds["checkpoint"] >= 0.002 * STEPS
    assert rank.seconds["compute"] > 0
    # A thread that sleeps is idle; Python's own time is the host's.
    assert rank.seconds["idle"] + rank.seconds["host_wait"] >= 0.003 * STEPS
    waited = {row.name: row.waited_seconds for row in rank.input_output}
    assert waited["loader"] == pytest.approx(rank.seconds["loader"])


def test_flops_equal_torch_and_the_closed_form(profiled: Profiled) -> None:
    rank = profiled.report.ranks[0]
    assert rank.flops == STEPS * count_flops(profiled.step).total
    root = next(row for row in rank.modules if row.path == "model")
    forward = closed_form_flops(BATCH, LENGTH, 32, 2, 64)
    assert root.flops["forward"] == STEPS * forward
    attention = 2 * (2 * 2 * BATCH * LENGTH * LENGTH * 32)
    # Backward: twice each product, and 2.5 times attention, which torch counts with its recomputed scores.
    assert root.flops["backward"] == STEPS * (2 * (forward - attention) + attention * 5 // 2)
    assert (root.flops["recomputed"] > 0) == profiled.model.recompute
    blocks = next(row for row in rank.modules if row.path == "model.blocks.1")
    assert blocks.flops["forward"] == STEPS * (forward - 2 * BATCH * LENGTH * 32 * 64) // 2
    assert root.parameters == sum(p.numel() for p in profiled.model.parameters())


def test_every_byte_at_the_peak_has_an_owner(profiled: Profiled) -> None:
    peak = profiled.report.ranks[0].memory[0]
    assert peak.named_share >= 0.98
    assert sum(one.bytes for one in peak.owners) == pytest.approx(peak.bytes)
    sizes = peak.by_category()
    weights = sum(p.numel() * p.element_size() for p in profiled.model.parameters())
    assert sizes["parameter"] == weights
    # Two moments of each weight, and a step count of 4 bytes.
    count = len(list(profiled.model.parameters()))
    assert sizes["optimizer state"] == pytest.approx(2 * weights + 4 * count)
    owners = {one.name for one in peak.owners if one.category in ("activation", "recomputed activation")}
    assert any(name.startswith("model.blocks.") for name in owners) or "gradient" in sizes
    assert UNNAMED not in sizes


def test_the_report_is_text_json_and_one_page(profiled: Profiled) -> None:
    text = (profiled.folder / "report.txt").read_text()
    for part in ("Wall time", "Modules", "Operators", "Memory at the peak", "Critical path"):
        assert part in text
    values = json.loads((profiled.folder / "report.json").read_text())
    assert values["ranks"][0]["flops"] == profiled.report.ranks[0].flops
    page = (profiled.folder / "report.html").read_text()
    assert not re.search(r"""(?:src|href)\s*=|url\(|https?://""", page), "the page needs another file"
    trace = read_trace(str(profiled.folder / "traces" / "rank_0.json.gz"))
    assert any(event.name == "module::model.blocks.0" for event in trace.host_events())


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("</script><img src=x onerror=alert(1)>", nn.Linear(4, 4))
    report = profile_step(lambda: model(torch.ones(2, 4)).sum().backward(), model)
    page = report.page()
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert any("onerror" in row.path for row in report.ranks[0].modules)


def test_an_error_writes_the_report_and_continues(tmp_path: Path) -> None:
    model = SmallModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 64, (BATCH, LENGTH))
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        out = model(ids)
        if calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        out.sum().backward()
        optimizer.step()

    with pytest.raises(torch.OutOfMemoryError, match="20 GiB"):
        profile_step(step, model, [optimizer], folder=str(tmp_path))
    values = json.loads((tmp_path / "report.json").read_text())
    assert "OutOfMemoryError" in values["error"]
    memory = values["ranks"][0]["memory"][0]
    assert memory["named_share"] >= 0.98
    assert any(owner["category"] == "activation" for owner in memory["owners"])


def test_an_error_before_the_window_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no profiler today")

    model = SmallModel()
    monkeypatch.setattr(torch.autograd.profiler.profile, "_start_trace", fail)
    with pytest.raises(RuntimeError, match="no profiler today"):
        profile_step(lambda: None, model)
    assert not any(one._forward_pre_hooks for one in model.modules()), "annotations stayed"


PARTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: (min(pair), max(pair))), max_size=8)


@given(PARTS, PARTS)
def test_sets_of_time_follow_set_algebra(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    def points(found: Intervals) -> set[int]:
        return {point for start, end in found for point in range(int(start), int(end))}

    one, other = union(first), union(second)
    assert points(intersect(one, other)) == points(one) & points(other)
    assert points(subtract(one, other)) == points(one) - points(other)
    assert length(one) == len(points(one))


OFFSETS = [0, 3, 10, 10, 16]


def packed_flops(heads: int, dim: int, offsets: list[int]) -> int:
    return sum(4 * heads * dim * (end - begin) ** 2 for begin, end in pairwise(offsets))


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_over_packed_documents_counts_their_lengths(key_heads: int) -> None:
    shapes = [[16, 4, 8], [16, key_heads, 8], [16, key_heads, 8], [5], [5], [], [], [], [], []]
    kinds = ["c10::BFloat16"] * 3 + ["int"] * 2 + ["Scalar"] * 5
    values = ["", "", "", "", "", "16", "16", "0.", "True", "False"]
    args = {"Input Dims": shapes, "Input type": kinds, "Concrete Inputs": values}
    event = HostEvent("aten::_flash_attention_forward", "cpu_op", 50.0, 60.0, 1, args)
    later = [0, 8, 8, 8, 16]
    boundaries = DocumentBoundaries([(10.0, OFFSETS), (20.0, [0, 16]), (70.0, later)])
    unknown: Counter[str] = Counter()
    assert operator_flops(event, unknown, boundaries) == packed_flops(4, 8, OFFSETS)
    assert not unknown
    if key_heads == 4:
        query, offsets = torch.empty(16, 4, 8, device="meta"), torch.tensor(OFFSETS)
        counted = flop_registry[torch.ops.aten._flash_attention_forward](query, query, query, offsets, offsets, 16, 16)
        assert counted == packed_flops(4, 8, OFFSETS)
    assert operator_flops(event, unknown, DocumentBoundaries([(70.0, later)])) == 0
    assert list(unknown) == ["aten::_flash_attention_forward"]


def test_boundaries_are_seen_as_arguments_and_in_masks() -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
            return x

    block, times = Block(), iter(range(100))
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    with BoundarySightings([block], lambda: next(times)) as seen:
        block(torch.ones(2), mask=SimpleNamespace(boundaries=offsets))
        block(torch.ones(2), mask=SimpleNamespace(boundaries=offsets))  # once
        block(torch.ones(2), torch.tensor([0, 16], dtype=torch.int32))
        block(torch.ones(2), torch.tensor([4, 1], dtype=torch.int32))  # no boundaries
    block(torch.ones(2), torch.tensor([0, 1], dtype=torch.int32))  # after the window
    assert [found for _, found in seen.offsets()] == [OFFSETS, [0, 16]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packed_attention_on_the_device_has_its_flops() -> None:
    from piledriver.kernels.attention.varlen import varlen

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(128, 128, bias=False)

        def forward(self, x: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
            q = self.project(x).view(1, 256, 2, 64).transpose(1, 2)
            return varlen(q, q, q, boundaries, 0.125, None)

    model = Packed().to("cuda", torch.bfloat16)
    offsets = [0, 100, 101, 256]
    boundaries = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    x = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
    report = profile_step(lambda: model(x, boundaries).float().sum().backward(), model, steps=2)
    root = next(row for row in report.ranks[0].modules if row.path == "model")
    forward, attention = 2 * 256 * 128 * 128, packed_flops(2, 64, offsets)
    assert root.flops["forward"] == 2 * (forward + attention)
    # The backward computes five products for the forward's two; no gradient of x is needed.
    assert report.ranks[0].flops == 2 * (2 * forward + attention * 7 // 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")  # torch 2.11's compiler
def test_a_profile_on_the_device(compiled: bool) -> None:
    held_by_others = torch.cuda.memory_allocated()  # tests before this one in the same process
    model = SmallModel(width=256).cuda()
    if compiled:
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters())
    step = make_step(model, optimizer, "cuda")
    report = profile_step(step, model, [optimizer], warm_up=3, steps=STEPS)
    rank = report.ranks[0]
    assert sum(rank.seconds.values()) == pytest.approx(rank.wall_seconds, rel=0.02)
    peak = rank.memory[0]
    assert peak.device.startswith("cuda")
    assert peak.named_share * peak.bytes + held_by_others >= 0.98 * peak.bytes
    assert peak.bytes == pytest.approx(rank.facts["peak_bytes"], rel=0.02)
    root = next(row for row in rank.modules if row.path == "model")
    assert root.seconds["backward"] > 0
    assert root.flops["forward"] == STEPS * closed_form_flops(BATCH, LENGTH, 256, 2, 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_without_memory_writes_the_report_and_raises(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    rows = 512

    def step() -> None:
        nonlocal rows
        rows *= 8  # the third step needs more than there is
        model(torch.randn(rows, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    # A limit for this process alone: other tests may share the device.
    torch.cuda.set_per_process_memory_fraction((4 << 30) / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            profile_step(step, model, [optimizer], folder=str(tmp_path))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    values = json.loads((tmp_path / "report.json").read_text())
    assert "out of memory" in values["error"]
    memory = values["ranks"][0]["memory"][0]
    assert memory["device"].startswith("cuda")
    assert memory["named_share"] >= 0.98
    assert {"parameter", "activation"} <= set(memory["by_category"])
