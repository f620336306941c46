"""The number of steps in a budget of tokens or minutes, and the default schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from piledriver.data.stream.loader import to_tensors
from piledriver.models import Transformer
from piledriver.optim import ScheduleConfig
from piledriver.runtime.collectives.operations import gather_object
from piledriver.train.setup import RunComponents
from piledriver.train.step import document_context


def total_steps(components: RunComponents, model: Transformer, optimizer: Any, saved: Mapping[str, Any] | None) -> int:
    """Return the steps in the budget; minutes are converted once, by timing passes of this model on this machine.

    `saved` is the `extra` of the checkpoint that the run resumes from; it holds the steps of a budget in minutes.
    """
    config = components.config
    if config.budget_tokens is not None:
        return config.budget_tokens // components.batching.tokens_per_step
    if saved is not None:
        return int(saved["total_steps"])
    assert config.budget_minutes is not None
    return max(1, int(60 * config.budget_minutes / _probed_seconds(components, model, optimizer)))


def _probed_seconds(components: RunComponents, model: Transformer, optimizer: Any) -> float:
    """Return the seconds of an optimizer step, estimated from forward and backward passes without an update."""
    batch = to_tensors(components.stream.read(0, components.batching.windows_per_micro_batch), 0, components.device)
    seconds = math.inf
    for _ in range(3):
        begun = time.monotonic()
        sums = model(batch.inputs, targets=batch.labels, **document_context(model, batch, components))
        (sums.total / sums.tokens).backward()
        float(sums.tokens)  # waits for the device
        seconds = min(seconds, time.monotonic() - begun)
    optimizer.zero_grad(set_to_none=True)
    # The slowest rank sets the pace of all; 10% is added for the optimizer and the rest.
    slowest = max(gather_object(components.world, seconds)) if components.world.is_distributed else seconds
    return 1.1 * components.batching.accumulation * slowest


def default_schedule(steps: int) -> ScheduleConfig:
    """Return a warm-up over 2% of the steps, then a cosine to a tenth of the peak."""
    warmup = min(max(1, steps // 50), steps - 1)
    return ScheduleConfig(kind="cosine", warmup=warmup, total=steps, floor=0.1)
