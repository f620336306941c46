"""DeepSpeed's names of estimators and of its tuner lead to the planner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from piledriver.compat.deepspeed import autotune
from piledriver.compat.deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from piledriver.compat.deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live
from piledriver.core.errors import UnknownNameError
from piledriver.engine.layout import Layout
from piledriver.models import ModelConfig, Transformer
from piledriver.plan.blocks.parameters import stages_of_layout
from piledriver.plan.memory.states import stage_total

CONFIG = ModelConfig(vocab_size=32000, dim=1024, layers=8, heads=8, max_positions=1024)


def test_estimates_are_the_bytes_that_the_engine_places(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = Transformer(CONFIG)
    for stage, rows in (
        (2, estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=8)),
        (3, estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=8)),
    ):
        layout = Layout(zero=stage).on(8)  # type: ignore[arg-type]
        placed = stage_total(CONFIG, stages_of_layout(CONFIG, layout)[0], layout, "adamw")
        block = 2 * 2 * sum(p.numel() for p in model.blocks["0"].parameters()) if stage == 3 else 0
        assert rows[-1].per_gpu == pytest.approx(placed.weights + placed.gradients + placed.states + block, rel=0.01)
        assert rows[0].per_gpu < rows[-1].per_gpu
    assert "per GPU" in capsys.readouterr().out


def test_open_values_are_chosen_and_set_ones_kept(tmp_path: Path) -> None:
    given = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": 64,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "autotuning": {"enabled": True, "fast": True},
    }
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(given))
    tuned = autotune(file, "llama-3-8b", hardware="8xh100-80g", length=4096)
    config = tuned.config
    assert config["zero_optimization"]["stage"] == 3
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 8 == 64
    assert "autotuning" not in config
    assert tuned.plan.best.fits


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="metric"):
        autotune({"autotuning": {"metrik": "throughput"}}, "gpt2", hardware="1xh100")
