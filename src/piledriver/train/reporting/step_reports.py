"""The figures of a run's steps, shown and written when the device has them: a step behind, so that nobody waits."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from piledriver.models.model_size import flops_per_token
from piledriver.observe.memory import memory_use
from piledriver.train.reporting.display import Display
from piledriver.train.reporting.metrics import MetricLog
from piledriver.train.setup import RunComponents
from piledriver.train.step import PendingStep, Result, StopSaveVote

_WILL = {"log": "noted", "skip": "its update is left out", "rollback": "going back"}


@dataclass(frozen=True)
class _Due:
    """A step that is still to be reported, with what the host knew when it handed it over."""

    step: int
    """Counted from one."""
    taken: PendingStep
    begun: float
    learning_rate: float
    memory_bytes: int
    passed_over: int


class Reports:
    """Where figures go."""

    def __init__(
        self, components: RunComponents, metrics: MetricLog, shown: Display, *, peak: float | None, total_steps: int
    ) -> None:
        self._components, self._metrics, self._shown, self._total_steps = components, metrics, shown, total_steps
        self._per_token = flops_per_token(components.shape, components.batching.seq_len)
        self._peak = peak
        self._due: _Due | None = None
        self._ended = -math.inf
        self.last: Result | None = None
        """Of the last step that was reported."""
        self.vote = StopSaveVote()
        """What any process votes in the steps that were reported, since the last save."""

    def add(self, step: int, taken: PendingStep, *, begun: float, learning_rate: float, passed_over: int) -> None:
        """A step was handed to the device: report the one before, which that may have done by now."""
        self.flush()
        memory = memory_use(self._components.device)
        memory_bytes = memory.device_peak or memory.host_rss
        self._due = _Due(step, taken, begun, learning_rate, memory_bytes, passed_over)

    def flush(self, also: Mapping[str, Any] | None = None, *, rolled_back_to: int | None = None) -> None:
        """Report what is still to be reported, with more figures; waits for the device."""
        if self._due is None:
            return
        due, self._due = self._due, None
        result = self.last = due.taken.result()
        self.vote = StopSaveVote(*map(operator.or_, self.vote, result.vote))
        figures = {**self._figures(due, result), **(also or {})}
        if result.broken:
            will = _WILL[self._components.config.spikes.action]
            self._shown.say(f"step {due.step}: loss {result.loss:.4g}, gradient norm {result.norm:.4g}: {will}")
        if rolled_back_to is not None:
            self._metrics.write({**figures, "rolled_back_to": rolled_back_to})
            return
        if due.step % self._components.config.log_steps == 0 or due.step == self._total_steps or result.broken:
            self._metrics.write(figures)
        self._shown.show(figures)

    def flush_what_is_there(self) -> None:
        """The same after an error, when it may be in vain to wait."""
        # A device that failed has said so already.
        with suppress(RuntimeError):
            if self._due is not None and self._due.taken.reading.is_there():
                self.flush()

    def say(self, text: str) -> None:
        """Something that should stay on the screen."""
        self._shown.say(text)

    def _figures(self, due: _Due, result: Result) -> dict[str, Any]:
        ended = due.taken.reading.there_at or time.monotonic()
        # The device begins with a step when it was handed over and the one before is done.
        seconds = ended - max(due.begun, self._ended)
        self._ended = ended
        tokens = self._components.batching.tokens_per_step
        rate = tokens / max(seconds, 1e-9)
        mfu = {} if self._peak is None else {"mfu": self._per_token * rate / (self._peak * self._components.world.size)}
        return {
            "step": due.step,
            "tokens": due.step * tokens,
            "loss": result.loss if math.isfinite(result.loss) else None,
            "gradient_norm": result.norm,
            "learning_rate": due.learning_rate,
            "tokens_per_second": rate,
            **mfu,
            "memory_gib": due.memory_bytes / 2**30,
            "skipped": result.skipped,
            "skipped_batches": result.left_out + due.passed_over,
        }
