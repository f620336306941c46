"""Rates that `calibrate` measures, and how predictions use them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from piledriver.engine.layout import Layout
from piledriver.models.presets import preset
from piledriver.plan import Workload, parse_hardware, predict
from piledriver.plan.hardware.host_rates import launch_seconds, offloaded_step_rate


def test_the_host_is_measured_with_the_models_and_the_engine_that_wait_for_it() -> None:
    device = torch.device("cpu")
    assert 1e-7 < launch_seconds(device, repeats=2) < 1e-2
    assert 1e5 < offloaded_step_rate(device, steps=2) < 1e12


def test_a_measured_offloaded_step_replaces_the_usual_rate_and_its_transfers() -> None:
    cluster = parse_hardware("1xh200")
    workload = Workload(config=preset("gpt2-124m"), length=1024, batch=4)
    layout = Layout(offload="optimizer", precision="bf16", compile=False)

    def offload(rate: float) -> float:
        device = replace(cluster.device, measured={"offloaded_step": rate})
        return predict(workload, layout, replace(cluster, device=device), sequences=4).time.offload

    parameters = sum(weight.numel() for weight in _weights(workload))
    assert offload(1e9) == pytest.approx(parameters / 1e9, rel=1e-3)
    assert offload(1e9) == pytest.approx(2 * offload(2e9))


def _weights(workload: Workload) -> list[torch.Tensor]:
    from piledriver.models import Transformer

    with torch.device("meta"):
        return list(Transformer(workload.config).parameters())
