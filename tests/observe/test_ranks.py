"""Profiles and collectives of several ranks, on real gloo processes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from piledriver.accelerator import Accelerator, ProfileKwargs
from piledriver.compat.deepspeed import configure_comms_logger, log_summary
from piledriver.observe.communication import CommunicationRecorder
from piledriver.observe.report.ranks import clock_offsets
from tests.checkpoint.processes import run as on_ranks

BYTES = 4 * 1000


def on_rank(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    before = vars(dist.ProcessGroup)["allreduce"]
    with CommunicationRecorder() as recorder:
        for _ in range(4):
            if rank == 1:
                time.sleep(0.02)
            dist.all_reduce(torch.ones(1000))
        dist.all_gather_into_tensor(torch.empty(2000), torch.ones(1000))
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(10, 10))
        ddp(torch.ones(2, 10)).sum().backward()
        dist.barrier()
    found["restored"] = vars(dist.ProcessGroup)["allreduce"] is before
    found["rows"] = [
        (row.name, row.size, row.count, row.ranks, row.bus_bandwidth, row.skew_seconds)
        for row in recorder.summary(across_ranks=True)
    ]
    with CommunicationRecorder() as recorder:
        for _ in range(700):  # more than the Flight Recorder keeps
            dist.all_reduce(torch.ones(10))
            dist.all_reduce(torch.ones(20))
            dist.all_reduce(torch.ones(20))
        found["resting"] = vars(dist.ProcessGroup)["allreduce"] is before
    found["counts"] = {row.size: row.count for row in recorder.summary()}
    configure_comms_logger(enabled=True)
    dist.all_reduce(torch.ones(1000))
    found["summary"] = log_summary(show_straggler=True, return_dict=True)
    configure_comms_logger(enabled=False)

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*_parts())
    options = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 2},
        record_shapes=True,
        profile_memory=True,
        output_trace_dir=folder,
        report=True,
    )
    with accelerator.profile(options) as profiler:
        for _ in range(8):
            if rank == 1:
                time.sleep(0.03)
            accelerator.backward(model(torch.ones(4, 32)).sum())
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    found["cycles"] = len(profiler.reports)
    found["steps"] = [one.steps for one in profiler.report.ranks]
    found["stragglers"] = [one.rank for one in profiler.report.stragglers]
    found["path"] = {part.rank for part in profiler.report.critical_path}
    found["sums"] = [sum(one.seconds.values()) / one.wall_seconds for one in profiler.report.ranks]
    found["advice"] = [one.rule for one in profiler.report.advice]
    return found


def _parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(32, 32)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def test_ranks_of_one_host_share_its_clock() -> None:
    # Rank 1 started its profiler 157 ms later: its times count from there.
    ranks: Any = [
        SimpleNamespace(rank=rank, host=f"machine:{rank}", timeline=SimpleNamespace(base_us=1e15 + 157_000.0 * rank))
        for rank in range(2)
    ]
    assert clock_offsets(ranks) == {0: 0.0, 1: 157_000.0}


@pytest.mark.slow
def test_collectives_and_profiles_of_two_ranks(tmp_path: Path) -> None:
    for found in on_ranks(2, on_rank, str(tmp_path)):
        assert found["restored"]
        rows = {(name, size): rest for name, size, *rest in found["rows"]}
        count, ranks, bandwidth, skew = rows["all_reduce", BYTES]
        assert (count, ranks) == (4, 2)
        assert bandwidth > 0
        assert skew > 0
        assert rows["all_gather", 2 * BYTES][0] == 1
        # DDP's reducer is C++: the Flight Recorder sees its all-reduce.
        assert ("all_reduce", 4 * 110) in rows
        # Python looks at the first calls only; counts are scaled from the latest to all.
        assert found["resting"]
        assert found["counts"] == pytest.approx({40: 700, 80: 1400}, rel=0.01)
        assert found["summary"]["summary"]["all_reduce"][BYTES]["count"] == 1
        assert found["cycles"] == 2
        assert found["steps"] == [2, 2]
        assert found["stragglers"][0] == 1
        assert 1 in found["path"]
        assert found["sums"] == pytest.approx([1, 1], rel=0.02)
        assert found["advice"][0] in ("straggler", "blocked thread")
    for cycle in (1, 2):
        values = json.loads((tmp_path / f"cycle_{cycle}" / "report.json").read_text())
        assert [one["rank"] for one in values["ranks"]] == [0, 1]
        assert (tmp_path / f"cycle_{cycle}" / "profile_1.json").exists()
    assert (tmp_path / "profile_0.json").exists()
