"""System counters: rates, wrapping energy counters, one file per rank, and the summary over ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from piledriver.observe.monitor import SystemMonitor
from piledriver.observe.rank_log import RankLog
from piledriver.observe.system.host import HostCounters
from piledriver.observe.system.rapl import RaplEnergy


def test_host_counters_and_their_rates(tmp_path: Path) -> None:
    counters = HostCounters()
    first = counters.read()
    kept = [open(tmp_path / f"{number}", "w") for number in range(5)]
    second = counters.read()
    for file in kept:
        file.close()
    assert second["process/open_files"] - first["process/open_files"] == 5
    for name in ("host/cpu_percent", "host/available_bytes", "process/threads", "network/sent_bytes_per_second"):
        assert second[name] >= 0
    assert "network/sent_bytes_per_second" not in first, "a rate needs two reads"


def zone(root: Path, name: str, microjoules: int) -> None:
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text("1000000\n")


def test_energy_adds_packages_once_and_survives_a_counter_that_wraps(tmp_path: Path) -> None:
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0", "intel-rapl-mmio:0"):
        zone(tmp_path, name, 900_000)
    energy = RaplEnergy(tmp_path)
    zone(tmp_path, "intel-rapl:0", 950_000)
    zone(tmp_path, "intel-rapl:0:0", 950_000)
    assert energy.read() == pytest.approx(0.05)
    zone(tmp_path, "intel-rapl:1", 100_000)  # past its end
    assert energy.read() == pytest.approx(0.05 + 0.2)
    assert RaplEnergy(tmp_path / "nothing").read() is None


def test_every_rank_has_a_file_and_rank_0_summarises_them(tmp_path: Path) -> None:
    ranks = [RankLog(tmp_path, rank, 3) for rank in range(3)]
    for rank, log in reversed(list(enumerate(ranks))):
        log.step(7, seconds=0.5 + rank, data_seconds=0.25)
        log.step(8, seconds=0.5 + rank, data_seconds=0.75)
        log({"device/power_watts": 100.0 * rank, "host/cpu_percent": float("nan") if rank else 5.0})
    rows = [json.loads((tmp_path / "ranks" / f"{rank:05d}.jsonl").read_text()) for rank in range(3)]
    assert [row["step_seconds"] for row in rows] == [0.5, 1.5, 2.5]
    assert [row["step"] for row in rows] == [8, 8, 8]
    assert "host/cpu_percent" not in rows[1], "JSON has no NaN"
    found = ranks[0].take()
    assert found["system/device/power_watts"] == 100
    assert found["system/device/power_watts_max"] == 200
    assert found["system/data_wait_seconds"] == 0.5
    assert ranks[0].take() == {}
    assert ranks[1].take() == {}


def test_a_rank_that_stopped_or_wrote_half_a_line_is_not_summarised(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/00001.jsonl").write_text(json.dumps({"time": time.time() - 3600, "x": 100.0}) + "\n")
    (tmp_path / "ranks/00002.jsonl").write_text('{"time": 1, "x"')
    log = RankLog(tmp_path, 0, 3)
    log({"x": 1.0})
    assert log.take() == {"system/x": 1.0, "system/x_max": 1.0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_counters_by_the_drivers_library() -> None:
    from piledriver.observe.system.nvml import NvmlDevice

    weights = torch.randn(4096, 4096, device="cuda")
    device = NvmlDevice(str(torch.cuda.get_device_properties(0).uuid))
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        weights = torch.tanh(weights @ weights)
    torch.cuda.synchronize()
    found = device.read()
    assert found["device/utilisation_percent"] > 10
    assert 20 < found["device/power_watts"] < 2000
    assert 10 < found["device/temperature_celsius"] < 110
    assert found["device/clock_mhz"] > 100
    assert found["device/used_bytes"] > weights.nbytes
    # The counter advances by the power times about one second.
    assert 0.1 < found["device/energy_joules"] / found["device/power_watts"] < 10
    sample = SystemMonitor(every_s=60).sample()
    assert sample["device/allocated_bytes"] >= weights.nbytes
    assert "device/energy_joules" in sample
