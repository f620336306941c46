"""`layout="auto"`: the plainest layout that fits, else the planner's; a run stands beside its prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from piledriver import Accelerator
from piledriver.engine.layout import Layout
from piledriver.models import ModelConfig, Transformer
from piledriver.models.presets import preset
from piledriver.plan import Workload, parse_hardware
from piledriver.plan.learn import counted_bytes, drifts, learn_from_runs, record_measurement, save_prediction
from piledriver.plan.prediction import predict
from piledriver.plan.time.rates import Efficiency
from piledriver.plan.training import choose_for_model, choose_for_training


def test_replicas_are_kept_where_they_fit() -> None:
    workload = Workload(config=preset("gpt2-124m"), length=1024, batch=32)
    chosen = choose_for_training(workload, Layout(precision="bf16"), parse_hardware("1xh200"), sequences=32)
    assert chosen.layout == Layout(precision="bf16")
    assert "the plainest" in chosen.reason


def test_a_model_that_replicas_cannot_hold_is_sharded_with_the_reason() -> None:
    workload = Workload(config=preset("llama-3-8b"), length=8192, batch=64)
    chosen = choose_for_training(workload, Layout(precision="bf16"), parse_hardware("8xh100-80g"), sequences=4)
    assert chosen.prediction is not None
    assert chosen.prediction.fits
    assert chosen.layout.zero > 0 or chosen.layout.tp > 1 or chosen.layout.pp > 1
    assert "GiB too large" in chosen.reason


def test_nothing_is_refused_where_nothing_fits() -> None:
    workload = Workload(config=preset("llama-3-70b"), length=8192, batch=1)
    plain = Layout(precision="bf16")
    chosen = choose_for_training(workload, plain, parse_hardware("1xl4"), sequences=1)
    assert chosen.layout == plain
    assert "nothing is predicted to fit" in chosen.reason


def test_a_model_without_a_known_shape_is_placed_by_its_states() -> None:
    with torch.device("meta"):
        large = nn.Linear(50_000, 50_000)
    cluster = parse_hardware("8xa100-40g")
    assert choose_for_model(large, cluster, precision="bf16", sequences=None).layout.zero == 3
    assert choose_for_model(nn.Linear(2, 2), cluster, precision="bf16", sequences=None).layout.zero == 0


def test_an_accelerator_chooses_when_it_sees_the_model() -> None:
    config = ModelConfig(vocab_size=64, dim=16, layers=2, heads=2, max_positions=16)
    accelerator = Accelerator(layout="auto", cpu=True)
    model = Transformer(config)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    tokens = torch.randint(64, (2, 17))
    sums = model(tokens[:, :-1], targets=tokens[:, 1:])
    accelerator.backward(sums.total / sums.tokens)
    optimizer.step()
    assert accelerator.layout.zero == 0


def test_a_measurement_stands_beside_its_prediction_and_drift_is_named(tmp_path: Path) -> None:
    workload = Workload(config=preset("gpt2-124m"), length=1024, batch=32)
    made = predict(workload, Layout(precision="bf16"), parse_hardware("1xh200"), sequences=32)
    save_prediction(tmp_path, made)
    seconds, peak = made.time.total, made.worst.allocated
    assert record_measurement(tmp_path, step_seconds=1.05 * seconds, peak_bytes=1.05 * peak) == []
    (slow,) = record_measurement(tmp_path, step_seconds=1.3 * seconds, peak_bytes=peak)
    assert "+30%" in slow
    assert f"what moved is compute, {300 * seconds:+.1f} ms" in slow
    (tmp_path / "ranks").mkdir()
    rows = [{"step": step, "data_wait_seconds": 0.28 * seconds} for step in range(6, 12)]
    (tmp_path / "ranks" / "00000.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (waits,) = record_measurement(tmp_path, step_seconds=1.3 * seconds, peak_bytes=peak)
    assert f"what moved is waiting for data, {280 * seconds:+.1f} ms" in waits
    (large,) = record_measurement(tmp_path, step_seconds=seconds, peak_bytes=1.2 * peak)
    assert "+20%" in large
    assert "kept activations" in large
    found = json.loads((tmp_path / "prediction.json").read_text())
    assert drifts(found) == [large]


def test_the_category_that_moved_is_named_not_the_largest(tmp_path: Path) -> None:
    workload = Workload(config=preset("gpt2-124m"), length=1024, batch=32)
    made = predict(workload, Layout(precision="bf16"), parse_hardware("1xh200"), sequences=32)
    save_prediction(tmp_path, made)
    said, extra = made.worst.peak.by_category(), 2 * 2**30
    states = said["optimizer states"] + extra
    counted = counted_bytes({"memory/parameters_gib": said["weights"] / 2**30, "memory/optimizer_gib": states / 2**30})
    peak = made.worst.allocated + extra
    (line,) = record_measurement(tmp_path, step_seconds=made.time.total, peak_bytes=peak, categories=counted)
    assert "what moved is optimizer states, +2.00 GiB" in line


def test_learning_from_runs_brings_predictions_nearer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    workload = Workload(config=preset("gpt2-124m"), length=1024, batch=32)
    slow_memory = Efficiency(memory=0.4)
    for batch in (8, 16, 32):
        layout, cluster = (
            Layout(precision="bf16", activations="keep" if batch > 8 else "full"),
            parse_hardware("1xh200"),
        )
        one = predict(replace(workload, batch=batch), layout, cluster, sequences=8)
        folder = tmp_path / f"run{batch}"
        folder.mkdir()
        save_prediction(folder, one)
        rate = predict(one.workload, layout, cluster, sequences=8, efficiency=slow_memory).tokens_per_second
        lines = [json.dumps({"step": step, "tokens_per_second": rate}) for step in range(1, 12)]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
    found = learn_from_runs([str(tmp_path / f"run{batch}") for batch in (8, 16, 32)], device="a test device")
    assert found["mean error before"] > 0.15
    assert found["mean error after"] < 0.05
    assert found["what moved"].startswith("memory")
    assert found["drift"]
