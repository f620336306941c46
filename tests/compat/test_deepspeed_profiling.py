"""DeepSpeed's profiling names over ours."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from piledriver.compat.deepspeed import ConfiguredProfiling, get_model_profile, log_summary, see_memory_usage


def test_get_model_profile_counts_what_the_closed_form_says(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    expected = 2 * 4 * (10 * 20 + 20 * 5)
    for _ in range(2):  # repeated profiles do not add up
        flops, macs, count = get_model_profile(model, (4, 10), as_string=False)
        assert (flops, macs, count) == (expected, expected // 2, 325)
    assert "Linear" in capsys.readouterr().out
    strings = get_model_profile(model, args=[torch.ones(4, 10)], print_profile=False)
    assert strings == ("2.40 K", "1.20 KMACs", "325")


def test_the_sections_of_a_ds_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = tmp_path / "flops.txt"
    config = {
        "wall_clock_breakdown": True,
        "steps_per_print": 2,
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": str(out)},
        "comms_logger": {"enabled": True},
    }
    with caplog.at_level(logging.INFO), ConfiguredProfiling(config, model) as profiling:
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert log_summary(return_dict=True) == {"summary": {}}
    names = {f"Train/Samples/elapsed_time_ms_{part}" for part in ("forward", "backward", "step")}
    assert set(profiling.times) == names
    assert "step 2" in out.read_text()
    assert caplog.text.count("time (ms)") == 2
    assert not model._forward_hooks


def test_see_memory_usage_speaks_only_when_forced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        see_memory_usage("quiet")
        see_memory_usage("after the forward", force=True)
    assert "quiet" not in caplog.text
    assert "after the forward" in caplog.text
    assert "Max_MA" in caplog.text
