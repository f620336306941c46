"""The resolved config of a run: every derived value decided, printed once and saved in the run folder."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from piledriver.core.config import to_mapping
from piledriver.engine.pipeline_parallel.schedules import microbatches_of
from piledriver.optim import ScheduleConfig
from piledriver.train.setup import RunComponents

FILE = "resolved.yaml"


def resolved_config(components: RunComponents, total_steps: int, schedule: ScheduleConfig) -> dict[str, Any]:
    """Return the config as plain data, without null or `auto`: keys that do not apply are omitted.

    `run` holds derived values: steps, and how a global batch is divided. The file is a record; a run resumes with its
    own config, which fits any number of ranks.
    """
    config, layout, batching = components.config, components.layout, components.batching
    if layout.pp > 1:
        layout = replace(layout, microbatches=microbatches_of(layout), stages_per_rank=layout.stages // layout.pp)
    known = replace(
        config,
        layout=layout,
        schedule=schedule,
        data=replace(config.data, seq_len=batching.seq_len),
        micro_batch_tokens=batching.windows_per_micro_batch * batching.seq_len,
        validate_steps=config.validate_steps or validation_interval(total_steps),
    )
    derived = {
        "steps": total_steps,
        "processes": components.world.size,
        "device": components.device.type,
        "tokens_per_step": batching.tokens_per_step,
        **{name: value for name, value in asdict(batching).items() if name != "seq_len"},
    }
    found: dict[str, Any] = _without_none({**to_mapping(known), "run": derived})
    return found


def validation_interval(total_steps: int) -> int:
    """Return the steps between validations where the config names none: ten validations in a run."""
    return max(1, total_steps // 10)


def _without_none(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_none(member) for name, member in value.items() if member is not None}
