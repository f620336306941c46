"""The machine at hand as a cluster: its devices, or its CPU with measured rates."""

from __future__ import annotations

import functools
from typing import Any

from piledriver.plan.hardware.catalog import make_cluster, name_of_driver
from piledriver.plan.hardware.cluster import Cluster
from piledriver.runtime.hardware import usable_cores


def detect_cluster(count: int | None = None) -> Cluster:
    """Return this machine's devices (or `count` of them); a stored calibration of this device is used."""
    import psutil
    import torch

    from piledriver.plan.hardware.calibration_file import load_calibration

    host = {"memory": psutil.virtual_memory().total / 2**30}
    if torch.cuda.is_available():
        found = torch.cuda.device_count()
        driver = torch.cuda.get_device_name()
        properties = torch.cuda.get_device_properties(0)
        name = name_of_driver(driver)
        changes: dict[str, Any] = {"memory": properties.total_memory / 2**30}
        if name is None:
            name = "h100-80g"
            changes |= {"name": driver.lower().replace(" ", "-"), "tile": properties.multi_processor_count}
        changes["host"] = {**host, "memory": host["memory"] / found}
        changes["measured"] = load_calibration(driver)
        return make_cluster(name, count or found, node_size=found, **changes)
    processes = count or 1
    rates = _cpu_rates(usable_cores())
    memory = psutil.virtual_memory().total / 2**30 / processes
    changes = {
        "memory": memory,
        "bandwidth": rates["bandwidth"] / 1e12,
        "peaks": dict.fromkeys(("fp32", "bf16", "fp16"), rates["flops"] / 1e12),
        "efficiency": {"matmul": 1.0, "attention": 0.5, "memory": 1.0, "link": 0.7, "network": 0.7},
        "host": {"memory": memory},
        "measured": load_calibration("cpu"),
    }
    return make_cluster("cpu", processes, node_size=processes, **changes)


@functools.cache
def _cpu_rates(cores: int) -> dict[str, float]:
    """Measure a matrix product and a copy for a few hundredths of a second: CPUs have no datasheet in the table."""
    import time

    import torch

    from piledriver.observe.flops import measured_peak

    flops = measured_peak("cpu", torch.float32, size=512, seconds=0.05)
    source = torch.empty(1 << 24)
    target = torch.empty_like(source)
    best = 1.0
    for _ in range(3):
        begun = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - begun)
    return {"flops": flops, "bandwidth": 2 * source.nbytes / best}
