"""DeepSpeed's `autotuning` section: a ds_config with batch sizes, stage and offload that the planner chose.

DeepSpeed runs experiments; this predicts them. Values that the config sets stay as they are; `"auto"` and missing ones
are chosen.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from piledriver.core.errors import ConfigError, UnknownNameError
from piledriver.engine.layout import Zero
from piledriver.engine.tiers import OffloadPreset
from piledriver.plan import Plan, Wishes, parse_hardware, plan
from piledriver.plan.hardware.cluster import Cluster
from piledriver.plan.model_config import config_of

SETTINGS = frozenset(
    {
        "enabled", "results_dir", "exps_dir", "overwrite", "metric", "start_profile_step", "end_profile_step", "fast",
        "max_train_batch_size", "mp_size", "num_tuning_micro_batch_sizes", "tuner_type", "tuner_early_stopping",
        "tuner_num_trials", "arg_mappings", "model_info", "model_info_path", "metric_path", "min_train_batch_size",
        "max_train_micro_batch_size_per_gpu", "min_train_micro_batch_size_per_gpu",
    }
)  # fmt: skip
"""Keys of the section. Those of experiments (folders, trials, profiled steps) have no effect: nothing is run."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A tuned config, with the plan that it comes from."""

    config: dict[str, Any]
    plan: Plan


def autotune(
    ds_config: Mapping[str, Any] | str | os.PathLike[str],
    model: Any,
    *,
    hardware: str | Cluster = "here",
    length: int | None = None,
) -> Tuned:
    """Return a ds_config with its open values chosen for a model on hardware.

    `model` is whatever `piledriver.plan.plan` takes. `mp_size` devices of each replica are tensor parallel.
    """
    given = dict(ds_config) if isinstance(ds_config, Mapping) else json.loads(Path(ds_config).read_text("utf-8"))
    section = _section(given)
    config, _ = config_of(model)
    cluster = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    length = length or config.max_positions
    micro = _number(given, "train_micro_batch_size_per_gpu")
    ranks = cluster.count // int(section.get("mp_size", 1))
    wishes = Wishes(
        precisions=(_precision(given),),
        zeros=_stages(given),
        offloads=_offloads(given),
        sequences=micro,
        tps=(int(section.get("mp_size", 1)),),
        data_parallel_only=True,
    )
    batch = _batch(given, section, ranks, micro, length)
    made = plan(model, batch, cluster, length=length, optimizer=_optimizer(given), wishes=wishes)
    return Tuned(config=_filled(given, made), plan=made)


def _section(given: Mapping[str, Any]) -> Mapping[str, Any]:
    section = given.get("autotuning") or {}
    for key in section:
        if key not in SETTINGS:
            raise UnknownNameError("key of autotuning:", key, SETTINGS)
    metric = section.get("metric", "throughput")
    if metric not in ("throughput", "flops", "latency"):
        raise ConfigError(f"autotuning.metric is {metric!r}", fix="use throughput, flops or latency")
    return section


def _number(given: Mapping[str, Any], key: str) -> int | None:
    value = given.get(key)
    return None if value in (None, "auto") else int(value)


def _precision(given: Mapping[str, Any]) -> str:
    for name in ("bf16", "fp16"):
        if (given.get(name) or {}).get("enabled") in (True, "auto"):
            return name
    return "bf16" if "bf16" not in given and "fp16" not in given else "fp32"


def _stages(given: Mapping[str, Any]) -> tuple[Zero, ...]:
    stage = (given.get("zero_optimization") or {}).get("stage", "auto")
    if stage in ("auto", "all", None):
        return (0, 1, 2, 3)
    return tuple(cast(Zero, int(one)) for one in (stage if isinstance(stage, list) else [stage]))


def _offloads(given: Mapping[str, Any]) -> tuple[OffloadPreset, ...]:
    zero = given.get("zero_optimization") or {}
    parameters = (zero.get("offload_param") or {}).get("device", "none")
    optimizer = (zero.get("offload_optimizer") or {}).get("device", "none")
    if parameters not in ("none", "auto"):
        return ("parameters",)
    if optimizer not in ("none", "auto"):
        return ("optimizer",)
    return ("none",) if "offload_optimizer" in zero and optimizer == "none" else ("none", "optimizer", "parameters")


def _optimizer(given: Mapping[str, Any]) -> str:
    kind = str((given.get("optimizer") or {}).get("type", "AdamW")).lower()
    return {"muon": "muon", "lion": "lion", "sgd": "sgd"}.get(kind, "adamw")


def _batch(given: Mapping[str, Any], section: Mapping[str, Any], ranks: int, micro: int | None, length: int) -> int:
    """Return the sequences of a step: given, or from micro-batch and accumulation, or about half a million tokens."""
    batch = _number(given, "train_batch_size")
    if batch is None and micro is not None:
        batch = micro * (_number(given, "gradient_accumulation_steps") or 1) * ranks
    if batch is None:
        batch = max(1, 2**19 // length // ranks) * ranks
        most = section.get("max_train_batch_size")
        batch = min(batch, int(most) // ranks * ranks) if most else batch
    if batch < 1 or batch % ranks:
        raise ConfigError(
            f"train_batch_size {batch} is not a multiple of {ranks} data-parallel ranks",
            fix=f"use {max(1, round(batch / ranks)) * ranks}",
        )
    return batch


def _filled(given: dict[str, Any], made: Plan) -> dict[str, Any]:
    found = copy.deepcopy(given)
    found.pop("autotuning", None)
    best, layout = made.best, made.layout
    found["train_batch_size"] = made.workload.batch
    found["train_micro_batch_size_per_gpu"] = best.sequences
    found["gradient_accumulation_steps"] = best.accumulation
    if layout.precision in ("bf16", "fp16"):
        found[layout.precision] = {**(found.get(layout.precision) or {}), "enabled": True}
    zero = {**(found.get("zero_optimization") or {}), "stage": layout.zero}
    if layout.offloads:
        zero["offload_optimizer"] = {"device": "cpu", **_set(zero.get("offload_optimizer"))}
    if layout.streams_parameters:
        zero["offload_param"] = {"device": "cpu", **_set(zero.get("offload_param"))}
    found["zero_optimization"] = zero
    if layout.activations == "full":
        found.setdefault("activation_checkpointing", {})
    return found


def _set(section: Any) -> dict[str, Any]:
    return {key: value for key, value in (section or {}).items() if value not in ("auto", "none")}
