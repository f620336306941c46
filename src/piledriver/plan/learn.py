"""Predictions beside measurements: write one with every run, compare, and refit rates from finished runs."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from piledriver.core.config import from_mapping, to_mapping
from piledriver.core.storage import atomic_write
from piledriver.engine.layout import Layout
from piledriver.models.config import ModelConfig
from piledriver.plan.errors import PlanError
from piledriver.plan.hardware.calibration_file import load_calibration, save_calibration
from piledriver.plan.hardware.cluster import Cluster
from piledriver.plan.hardware.parse import parse_hardware
from piledriver.plan.prediction import Prediction, Workload, predict
from piledriver.plan.result import prediction_mapping
from piledriver.plan.time.fit import CLASSES, fit_efficiency
from piledriver.plan.time.rates import Efficiency

FILE = "prediction.json"
DRIFT = 0.10
"""A measurement that differs from its prediction by more than this share is a warning."""
_GIB = 2**30
# The first steps compile and warm up.
_FIRST_STEPS = 5


def save_prediction(folder: str | Path, one: Prediction) -> None:
    """Write a prediction into a run folder."""
    workload = one.workload
    found = {
        **prediction_mapping(one),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": one.cluster.name,
        "config": to_mapping(workload.config),
        "length": workload.length,
        "batch": workload.batch,
        "optimizer": workload.optimizer,
        "full_layout": to_mapping(one.layout),
    }
    with atomic_write(Path(folder) / FILE) as file:
        file.write(json.dumps(found, indent=2).encode())


def counted_bytes(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes by category that a line of a run's metrics counts."""
    names = {"memory/parameters_gib": "weights", "memory/optimizer_gib": "optimizer states"}
    return {category: row[name] * _GIB for name, category in names.items() if row.get(name)}


def record_measurement(
    folder: str | Path, *, step_seconds: float, peak_bytes: float, categories: Mapping[str, float] | None = None
) -> list[str]:
    """Add what was measured to the prediction of a run; return a warning for each figure that drifted.

    `categories` are bytes that were counted, as `counted_bytes` returns them.
    """
    path = Path(folder) / FILE
    if not path.exists():
        return []
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found["measured"] = {
        "step_seconds": step_seconds,
        "data_wait_seconds": _data_wait(Path(folder)),
        "allocated_gib": peak_bytes / _GIB,
        "categories_gib": {name: size / _GIB for name, size in (categories or {}).items()},
    }
    with atomic_write(path) as file:
        file.write(json.dumps(found, indent=2).encode())
    return drifts(found)


def drifts(found: Mapping[str, Any]) -> list[str]:
    """Return a line for each measured figure that differs from its prediction by more than 10%, with its category.

    It is the category that moved the most. Of a step a run measures how long it waited for data; the rest is named by
    the largest part, which would have to change least.
    """
    lines = []
    measured, memory, time = found.get("measured") or {}, found["memory"], found["time"]
    if time and measured.get("step_seconds"):
        share = measured["step_seconds"] / time["step_seconds"] - 1
        if abs(share) > DRIFT:
            part, seconds = _part_that_moved(measured, time)
            lines.append(
                f"a step takes {1e3 * measured['step_seconds']:.1f} ms, {100 * share:+.0f}% against the prediction of "
                f"{1e3 * time['step_seconds']:.1f} ms; what moved is {part}, {1e3 * seconds:+.1f} ms"
            )
    if measured.get("allocated_gib"):
        share = measured["allocated_gib"] / memory["allocated_gib"] - 1
        if abs(share) > DRIFT:
            name, moved = _moved_most(measured, memory)
            lines.append(
                f"the peak is {measured['allocated_gib']:.2f} GiB, {100 * share:+.0f}% against the prediction of "
                f"{memory['allocated_gib']:.2f} GiB in phase '{memory['phase']}'; what moved is {name}, "
                f"{moved:+.2f} GiB"
            )
    return lines


def _part_that_moved(measured: Mapping[str, Any], time: Mapping[str, Any]) -> tuple[str, float]:
    """Return the part of a step that differs most from the prediction, and by how many seconds."""
    largest = max(time["parts"], key=lambda name: time["parts"][name])
    waited = float(measured.get("data_wait_seconds") or 0.0)
    rest = measured["step_seconds"] - time["step_seconds"] - waited
    return max((("waiting for data", waited), (largest, rest)), key=lambda pair: abs(pair[1]))


def _data_wait(folder: Path) -> float:
    """Return the median seconds that a step of a run waited for its data, on the rank that waited longest."""
    waits = []
    for path in sorted(folder.glob("ranks/*.jsonl")):
        rows = [row for row in _lines(path) if (row.get("step") or 0) > _FIRST_STEPS and "data_wait_seconds" in row]
        waits.append(statistics.median(row["data_wait_seconds"] for row in rows) if rows else 0.0)
    return float(max(waits, default=0.0))


def _moved_most(measured: Mapping[str, Any], memory: Mapping[str, Any]) -> tuple[str, float]:
    """Return the category whose bytes differ most from the prediction, and by how many GiB.

    Weights and states are counted; the rest of the peak is named by the largest category among it.
    """
    phases = next(line["phases"] for line in memory["timeline"] if line["rank"] == memory["rank"])
    said: dict[str, float] = next(phase["gib"] for phase in phases if phase["phase"] == memory["phase"])
    counted: Mapping[str, float] = measured.get("categories_gib") or {}
    moved = {name: size - said.get(name, 0.0) for name, size in counted.items()}
    others = {name: size for name, size in said.items() if name not in counted}
    if others:
        rest = max(others, key=lambda name: others[name])
        moved[rest] = measured["allocated_gib"] - memory["allocated_gib"] - sum(moved.values())
    return max(moved.items(), key=lambda pair: abs(pair[1]))


def learn_from_runs(folders: Sequence[str], *, device: str | None = None) -> dict[str, Any]:
    """Refit the efficiency of each kernel class to the measured steps of runs, and keep it with this device's rates."""
    rows = [row for folder in folders for row in _rows(Path(folder))]
    if not rows:
        raise PlanError(
            f"no run of {', '.join(map(str, folders))} has a prediction and metrics",
            fix="give folders of finished `piledriver train` runs",
        )
    known = [_known(found) for found, _ in rows]
    measured = [seconds for _, seconds in rows]

    def predictor(position: int) -> Any:
        workload, layout, cluster, sequences = known[position]
        return lambda efficiency: (
            predict(workload, layout, cluster, sequences=sequences, efficiency=efficiency).time.total
        )

    calls = [predictor(position) for position in range(len(rows))]
    before = statistics.mean(
        abs(call(Efficiency()) / seconds - 1) for call, seconds in zip(calls, measured, strict=True)
    )
    fitted = fit_efficiency(calls, measured, prior=0.05)
    moved = _class_that_moved(calls, measured)
    after = statistics.mean(abs(call(fitted) / seconds - 1) for call, seconds in zip(calls, measured, strict=True))
    name = device or _device_name()
    rates = load_calibration(name)
    rates["learned"] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "runs": len(rows),
        "efficiency": asdict(fitted),
    }
    path = save_calibration(name, rates)
    return {
        "runs": len(rows),
        "mean error before": round(before, 4),
        "mean error after": round(after, 4),
        "what moved": moved,
        **asdict(fitted),
        "file": str(path),
        "drift": [
            line
            for found, seconds in rows
            for line in drifts({**found, "measured": {**(found.get("measured") or {}), "step_seconds": seconds}})
        ],
    }


def _class_that_moved(calls: Sequence[Any], measured: Sequence[float]) -> str:
    """Return the kernel class that explains the measured steps best if it alone differs from the prediction."""

    def missing(name: str) -> float:
        fitted = fit_efficiency(calls, measured, names=(name,), prior=0.0)
        misses = [abs(call(fitted) / seconds - 1) for call, seconds in zip(calls, measured, strict=True)]
        return float(statistics.mean(misses))

    errors = {name: missing(name) for name in CLASSES}
    name = min(errors, key=lambda each: errors[each])
    return f"{name} (alone it leaves a mean error of {100 * errors[name]:.1f}%)"


def learned_efficiency(measured: Mapping[str, Any]) -> Efficiency | None:
    """Return the efficiency that `learn_from_runs` kept with a device's rates, None without one."""
    learned = measured.get("learned")
    return Efficiency(**learned["efficiency"]) if isinstance(learned, Mapping) else None


def _rows(folder: Path) -> list[tuple[dict[str, Any], float]]:
    path, metrics = folder / FILE, folder / "metrics.jsonl"
    if not path.exists() or not metrics.exists():
        return []
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rates = [
        row["tokens_per_second"]
        for row in _lines(metrics)
        if row.get("step", 0) > _FIRST_STEPS and row.get("tokens_per_second")
    ]
    if not rates:
        return []
    return [(found, found["batch"] * found["length"] / statistics.median(rates))]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON lines, but for one that a crash truncated."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _known(found: Mapping[str, Any]) -> tuple[Workload, Layout, Cluster, int]:
    config = from_mapping(ModelConfig, found["config"], "prediction.json")
    workload = Workload(config=config, length=found["length"], batch=found["batch"], optimizer=found["optimizer"])
    layout = from_mapping(Layout, found["full_layout"], "prediction.json")
    hardware = found["hardware"]
    cluster = parse_hardware("here" if "cpu" in hardware else hardware)
    return workload, layout, cluster, int(found["micro_batch"])


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
