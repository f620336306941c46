"""Timers, memory, FLOPs, communication, monitor and profile report."""

from __future__ import annotations

import json
import mmap
import time
from importlib import resources

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard

from piledriver.core.errors import UsageError
from piledriver.observe.communication import counted_communication
from piledriver.observe.flops import count_flops, measured_peak, model_flops_utilisation, peak_flops
from piledriver.observe.memory import memory_use, readable, reset_peak
from piledriver.observe.memory.use import reset_host_peak, step_memory
from piledriver.observe.monitor import SystemMonitor
from piledriver.observe.timers import StepTimer
from tests.checkpoint.processes import run as on_ranks
from tests.checkpoint.runs import cpu_mesh
from tests.patience import HANG_S


def test_timers_count_blocks_and_not_failures() -> None:
    timer = StepTimer("cpu")
    for _ in range(3):
        with timer("sleep"):
            time.sleep(0.002)
    with pytest.raises(ZeroDivisionError), timer("bad"):
        _ = 1 / 0
    timing = timer.timings()["sleep"]
    assert timing.count == 3
    assert timing.largest_s >= timing.median_s >= 0.002
    assert "bad" not in timer.timings()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_timers_on_the_device() -> None:
    timer = StepTimer("cuda")
    a = torch.randn(4096, 4096, device="cuda")
    with timer("matmul"):
        for _ in range(10):
            a = a @ a
    torch.cuda.synchronize()
    assert timer.timings()["matmul"].count == 1
    assert timer.timings()["matmul"].mean_s > 0
    reset_peak()
    assert memory_use().device_peak >= memory_use().device_allocated > 0


def test_memory() -> None:
    before = memory_use("cpu").host_rss
    held = torch.ones(400_000_000, dtype=torch.uint8)
    assert memory_use("cpu").host_rss > before + 200_000_000
    assert held.sum() == 400_000_000
    assert memory_use("cpu").host_available > 0


def test_the_peak_of_a_process_begins_again() -> None:
    size, cpu = 2**26, torch.device("cpu")
    before = reset_host_peak()
    with mmap.mmap(-1, size) as pages:  # memory that no allocator keeps
        for place in range(0, size, 4096):
            pages[place] = 1
    assert step_memory(cpu) - before > 0.9 * size
    after = reset_host_peak()
    assert step_memory(cpu) - after < 0.5 * size


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_flops_of_a_linear_layer_follow_the_formula(batch: int, fan_in: int, fan_out: int) -> None:
    layer = nn.Linear(fan_in, fan_out)
    inputs = torch.randn(batch, fan_in, requires_grad=True)
    forward = 2 * batch * fan_in * fan_out
    assert count_flops(lambda: layer(inputs)).total == forward
    # Backward: one product for the inputs' gradient and one for the weights'.
    assert count_flops(lambda: layer(inputs).sum().backward()).total == 3 * forward


def test_peaks_are_found_by_the_longest_name_and_ordered_by_dtype() -> None:
    table = json.loads(resources.files("piledriver.observe").joinpath("device_peaks.json").read_text())["devices"]
    for name, peaks in table.items():
        for dtype, peak in peaks.items():
            # A name of the table finds its own row, whatever stands around it, and no row with a shorter name.
            assert peak_flops(f"NVIDIA {name} x", getattr(torch, dtype)) == peak * 1e12
        # The same units multiply narrower numbers at least as fast.
        widths = ("float32", "bfloat16", "float8_e4m3fn")
        speeds = [peaks[dtype] for dtype in widths if dtype in peaks]
        assert speeds == sorted(speeds), name
    assert peak_flops("some new device") is None


@given(st.floats(1e6, 1e18), st.floats(1e-6, 1e3), st.floats(1e6, 1e16), st.integers(1, 4096))
def test_a_step_at_the_peak_of_all_devices_has_mfu_one(flops: float, seconds: float, peak: float, devices: int) -> None:
    assert model_flops_utilisation(peak * devices * seconds, seconds, peak, devices) == pytest.approx(1)
    used = model_flops_utilisation(flops, seconds, peak, devices)
    assert model_flops_utilisation(flops, 2 * seconds, peak, devices) == pytest.approx(used / 2)
    assert model_flops_utilisation(flops, seconds, peak, 2 * devices) == pytest.approx(used / 2)


@pytest.mark.parametrize("wrong", [(1.0, 0.0, 1.0, 1), (1.0, 1.0, 0.0, 1), (1.0, 1.0, 1.0, 0)])
def test_mfu_without_time_peak_or_devices_is_refused(wrong: tuple[float, float, float, int]) -> None:
    with pytest.raises(UsageError, match="undefined"):
        model_flops_utilisation(*wrong)


def test_a_measured_peak_is_what_the_products_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))  # each look at the clock is a second later
    assert measured_peak("cpu", torch.float32, size=16, seconds=3) == 2 * 16**3


def sharded_step(rank: int) -> tuple[dict[str, int], dict[str, int]]:
    model = nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=cpu_mesh())
    with counted_communication() as found:
        model(torch.ones(2, 8)).sum().backward()
    with counted_communication() as plain:
        dist.all_reduce(torch.ones(10))
    assert plain.calls == {"allreduce": 1}
    assert plain.bytes == {"allreduce": 40}
    return found.calls, found.bytes


@pytest.mark.slow
def test_communication_of_a_sharded_step() -> None:
    for calls, sizes in on_ranks(2, sharded_step):
        # The weight is gathered for the forward pass and its gradient scattered after the backward pass.
        assert any("gather" in name for name in calls)
        assert any("scatter" in name for name in calls)
        assert all(size == 8 * 8 * 4 for name, size in sizes.items() if calls[name] == 1)


def test_monitor_samples_and_survives_its_sink() -> None:
    seen = []

    def sink(sample: dict[str, float]) -> None:
        seen.append(sample)
        raise RuntimeError("the sink is broken")

    with SystemMonitor(every_s=0.005, sink=sink) as monitor:
        deadline = time.monotonic() + HANG_S
        while len(seen) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert len(seen) >= 3
    assert len(monitor.history) >= 3
    assert monitor.history[-1]["host/rss_bytes"] > 0
    count = len(monitor.history)
    time.sleep(0.05)
    assert len(monitor.history) == count


@given(st.integers(0, 2**60))
def test_readable_keeps_the_order_of_magnitude(size: int) -> None:
    number, unit = readable(size).split()
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert abs(float(number) * factor - size) <= 0.051 * factor
