"""Report the metrics of each step one step late, so that the host does not wait for the device."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from piledriver.models.model_size import flops_per_token
from piledriver.observe.memory.use import step_memory
from piledriver.train.deferred import DeferredScalars
from piledriver.train.reporting.display import Display
from piledriver.train.reporting.metrics import MetricLog
from piledriver.train.setup import RunComponents
from piledriver.train.step import PendingStep, Result, StopSaveVote

_WILL = {"log": "reported only", "skip": "its update is skipped", "rollback": "rolling back"}


@dataclass(frozen=True)
class _Due:
    """A step that is not reported yet, with what the host knew when it was enqueued."""

    step: int
    """Counted from one."""
    taken: PendingStep
    begun: float
    learning_rate: float
    memory_bytes: int
    skipped_batches: int


class Reports:
    """Writes the metrics of steps to the log and the display."""

    def __init__(
        self,
        components: RunComponents,
        metrics: MetricLog,
        shown: Display,
        *,
        peak: float | None,
        total_steps: int,
        bytes_before: int = 0,
    ) -> None:
        """Report steps; `bytes_before` are what a CPU's process held before the run, which are not the run's memory."""
        self._components, self._metrics, self._shown, self._total_steps = components, metrics, shown, total_steps
        self._per_token = flops_per_token(components.shape, components.batching.seq_len)
        self._peak, self._before = peak, bytes_before
        self.extra: Callable[[int, int], Mapping[str, Any]] = lambda step, memory_bytes: {}
        """More metrics of a step, by its number and its peak of memory in bytes."""
        self._due: _Due | None = None
        self._before_this: DeferredScalars | None = None
        self.last: Result | None = None
        """Values of the last reported step."""
        self.spikes_in_a_row = 0
        """Spikes up to the last reported step, with no other step between."""
        self.vote = StopSaveVote()
        """Votes of all ranks in the reported steps since the last save."""

    def add(self, step: int, taken: PendingStep, *, begun: float, learning_rate: float, skipped_batches: int) -> None:
        """Report the step before, then keep this one until the next call."""
        self.flush()
        memory_bytes = max(0, step_memory(self._components.device) - self._before)
        self._due = _Due(step, taken, begun, learning_rate, memory_bytes, skipped_batches)

    def flush(self, also: Mapping[str, Any] | None = None, *, rolled_back_to: int | None = None) -> None:
        """Report the pending step with additional metrics; waits for the device."""
        if self._due is None:
            return
        due, self._due = self._due, None
        result = self.last = due.taken.result()
        self.spikes_in_a_row = self.spikes_in_a_row + 1 if result.broken else 0
        self.vote = StopSaveVote(*map(operator.or_, self.vote, result.vote))
        figures = {**self._figures(due, result), **(also or {})}
        if result.broken:
            will = _WILL[self._components.config.spikes.action]
            self._shown.say(f"step {due.step}: loss {result.loss:.4g}, gradient norm {result.norm:.4g}: {will}")
        if rolled_back_to is not None:
            self._metrics.write({**figures, "rolled_back_to": rolled_back_to})
            return
        if due.step % self._components.config.log_steps == 0 or due.step == self._total_steps or result.broken:
            self._metrics.write({**figures, **self.extra(due.step, due.memory_bytes)})
        self._shown.show(figures)

    def flush_ready(self) -> None:
        """Report the pending step if that needs no wait; for use after an error."""
        with suppress(RuntimeError):
            if self._due is not None and self._due.taken.reading.is_ready():
                self.flush()

    def say(self, text: str) -> None:
        """Print a message that stays on the screen."""
        self._shown.say(text)

    def _figures(self, due: _Due, result: Result) -> dict[str, Any]:
        reading = due.taken.reading
        # The device starts a step when it is enqueued and the one before is done.
        seconds = (reading.ready_at or time.monotonic()) - due.begun
        if self._before_this is not None:
            seconds = min(seconds, reading.seconds_since(self._before_this))
        self._before_this = reading
        tokens = self._components.batching.tokens_per_step
        rate = tokens / max(seconds, 1e-9)
        mfu = {} if self._peak is None else {"mfu": self._per_token * rate / (self._peak * self._components.world.size)}
        return {
            "step": due.step,
            "time": round(time.time(), 3),
            "tokens": due.step * tokens,
            "loss": result.loss if math.isfinite(result.loss) else None,
            "gradient_norm": result.norm,
            "learning_rate": due.learning_rate,
            "tokens_per_second": rate,
            **mfu,
            "memory_gib": due.memory_bytes / 2**30,
            "skipped": result.skipped,
            "skipped_batches": result.skipped_updates + due.skipped_batches,
        }
