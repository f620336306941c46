"""The pretraining loop: train on token shards and write a run folder with metrics, checkpoints and the model.

The order of windows is a function of seed and step, and a checkpoint holds all other state. A run that was killed and
resumed, on the same or another number of ranks, therefore takes the same steps.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from piledriver.checkpoint.header import read_header
from piledriver.core.config import save_config
from piledriver.core.errors import ConfigError, MissingDependencyError, PiledriverError
from piledriver.data.tokens.token_set import open_tokens
from piledriver.models import Transformer, learning_rate_scales
from piledriver.observe.memory.use import reset_host_peak
from piledriver.optim import ScheduledLR, build_optimizer
from piledriver.plan.learn import counted_bytes, record_measurement, save_prediction
from piledriver.runtime.world import World
from piledriver.train.budget import default_schedule, total_steps
from piledriver.train.config import TrainConfig
from piledriver.train.layout.choice import predict_run
from piledriver.train.objective import Objective
from piledriver.train.position import Position
from piledriver.train.pretrained import has_same_tokenizer
from piledriver.train.reporting.display import display
from piledriver.train.reporting.log_file import LoggedDisplay, open_log
from piledriver.train.reporting.memory_parts import MemoryParts
from piledriver.train.reporting.metrics import metric_log, read_metrics
from piledriver.train.reporting.monitoring import leaks_watched, monitored
from piledriver.train.reporting.plots import save_plots
from piledriver.train.reporting.samples import write_samples
from piledriver.train.reporting.step_reports import Reports
from piledriver.train.resolved import FILE as RESOLVED
from piledriver.train.resolved import resolved_config, validation_interval
from piledriver.train.resume import CONFIG
from piledriver.train.save import MODEL, Saving, why_not_published
from piledriver.train.setup import build_components, make_model, materialise, peak_of
from piledriver.train.spikes.rollback import Skip, Snapshot
from piledriver.train.step import PendingStep, StopSaveVote, TrainStep
from piledriver.train.stopping import StopRequest, stop_on_signals

# Steps that compile and warm up, which a comparison with the prediction leaves out.
_WARM_STEPS = 5

Validate = Callable[[Transformer, World], dict[str, float]]
Sample = Callable[[Transformer, World], list[dict[str, str]]]


@dataclass(frozen=True)
class RunSummary:
    """The result of a run."""

    out: str
    steps: int
    tokens: int
    loss: float
    finished: bool
    """False if the run was stopped before the end of its budget."""
    skipped_batches: int
    """Batches without an update: skipped updates, and batches skipped by roll-backs."""
    tokens_per_second: float


def train(config: TrainConfig, *, validate: Validate | None = None, objective: Objective | None = None) -> RunSummary:
    """Train, or resume the run in `config.out`.

    `validate` returns validation metrics of the model by name. `objective` is what the run minimises.
    """
    return Trainer(config, validate, objective).run()


class Trainer:
    """One training run. Construction checks the config and builds the components; `run` trains."""

    def __init__(
        self,
        config: TrainConfig,
        validate: Validate | None = None,
        objective: Objective | None = None,
        *,
        sample: Sample | None = None,
    ) -> None:
        self.config, self.validate, self.sample = config, validate, sample
        # Of a process on a CPU: the interpreter and its libraries, which are no part of a prediction of tensors.
        held = reset_host_peak()
        self.components = components = build_components(config)
        self.world, self.batching = components.world, components.batching
        self.bytes_before = held if components.device.type == "cpu" else 0
        self.config = config = components.config
        model = make_model(components)
        objective = objective or Objective()
        objective.prepare(components, model)
        self.peak = peak_of(components)
        optimizer = build_optimizer(model, config.optimizer, lr_scales=learning_rate_scales(model))
        self.model = materialise(components, model)
        self.optimizer = components.accelerator.prepare_optimizer(optimizer)
        self.total_steps = self._count_steps()
        schedule = config.schedule or default_schedule(self.total_steps)
        self.resolved = resolved_config(components, self.total_steps, schedule)
        """The config with every derived value."""
        amount = self.batching.tokens_per_step if schedule.unit == "tokens" else 1
        self.scheduler = components.accelerator.prepare_scheduler(ScheduledLR(optimizer, schedule, amount=amount))
        self.position = Position(components)
        self.train_step = TrainStep(components, self.model, self.optimizer, self.scheduler, self.position, objective)
        self.saving = Saving(components, self.train_step, self.position.loader, self.total_steps)
        scaler = components.accelerator.scaler
        stateful = [self.scheduler, self.train_step.watch, *([scaler] if scaler else [])]
        self.snapshot = Snapshot(self.model, self.optimizer, stateful)

    def _count_steps(self) -> int:
        config, checkpoint = self.config, self.components.checkpoint
        saved = None if checkpoint is None else read_header(checkpoint)
        steps = total_steps(self.components, self.model, self.optimizer, None if saved is None else saved.extra)
        taken = 0 if saved is None else saved.step or 0
        if taken > steps:
            raise ConfigError(
                f"budget_tokens {config.budget_tokens} is {steps} steps, but {config.out} is at step {taken}",
                fix=f"use {taken * self.batching.tokens_per_step} or more, or another out",
            )
        return steps

    def run(self) -> RunSummary:
        """Resume from the last checkpoint if there is one, train to the end of the budget, and publish the model."""
        config = self.config
        first = self.saving.resume()
        if self.world.is_main:
            save_config(config, os.path.join(config.out, CONFIG))
            save_config(self.resolved, os.path.join(config.out, RESOLVED))
        self.position.record(first)
        with ExitStack() as stack:
            stack.callback(self.position.close)
            request = stack.enter_context(stop_on_signals())
            self._open_reports(stack, first)
            unpublished = why_not_published(self.components.shape)
            self._say_first(unpublished)
            self._write_prediction()
            started = time.monotonic()
            try:
                step, taken = self._loop(first, request)
            except IndexError:
                # A token id outside the vocabulary: shards were checked by size only, so compare their checksums now.
                open_tokens(self.components.tokens, check="all")
                raise
            self.saving.wait()
            seconds = max(1e-9, time.monotonic() - started)
            self._compare_with_prediction()
        finished = step == self.total_steps
        if finished and unpublished is None:
            self.saving.publish()
        if self.world.is_main and config.plots:
            with suppress(MissingDependencyError):
                save_plots(config.out)
        tokens = self.batching.tokens_per_step
        return RunSummary(
            out=config.out,
            steps=step,
            tokens=step * tokens,
            loss=self._last_loss(),
            finished=finished,
            skipped_batches=int(self.train_step.watch.skipped_updates) + self.position.skipped_batches,
            tokens_per_second=taken * tokens / seconds,
        )

    def _open_reports(self, stack: ExitStack, first: int) -> None:
        """Open metrics, display, log and monitors until the stack is closed."""
        config = self.config
        about = {"model": str(config.model), "batch_tokens": config.batch_tokens}
        is_main = self.world.is_main
        metrics = stack.enter_context(metric_log(config.out, config.trackers, is_main=is_main, config=about))
        shown = stack.enter_context(
            display(self.components.name, first_step=first, total_steps=self.total_steps, is_main=is_main)
        )
        log = open_log(config.out, is_main=is_main)
        if log is not None:
            stack.enter_context(log)
        shown = LoggedDisplay(shown, log, self.total_steps)
        self.ranks = stack.enter_context(monitored(self.components))
        self.reports = Reports(
            self.components,
            metrics,
            shown,
            peak=self.peak,
            total_steps=self.total_steps,
            bytes_before=self.bytes_before,
        )
        parts = MemoryParts(self.model, self.optimizer, self.components.device)
        self.reports.extra = lambda step, peak: {**parts.figures(peak, step, first), **self.ranks.take()}
        self.look_for_leaks = stack.enter_context(leaks_watched(self.components, self.reports.say))
        stack.callback(self.reports.flush_ready)

    def _say_first(self, unpublished: str | None) -> None:
        """Report what a user should know before the first step."""
        config, tokens = self.config, self.components.tokens
        if unpublished is not None:
            folder = os.path.join(config.out, MODEL)
            self.reports.say(f"{folder} will not be written, the weights stay in checkpoints: {unpublished}")
        if self.components.layout_reason:
            self.reports.say(f"layout: {self.components.layout_reason}")
        if self.world.is_main and has_same_tokenizer(config, tokens) is False:
            self.reports.say(
                f"the token shards {tokens} were made with another tokenizer than that of {config.model_folder}: "
                "for its weights the ids mean other text"
            )

    def _write_prediction(self) -> None:
        """Write what is predicted for this run beside what will be measured."""
        if self.world.is_main:
            made = predict_run(self.config, self.components.shape, self.components.accelerator, self.batching)
            if made is not None:
                save_prediction(self.config.out, made)

    def _compare_with_prediction(self) -> None:
        """Add the measured step and peak to the prediction; warn of drift on a GPU, whose rates are steady."""
        if not self.world.is_main:
            return
        rows = read_metrics(self.config.out)[_WARM_STEPS:]
        if rows:
            rate = statistics.median(row["tokens_per_second"] for row in rows)
            peak = max(row["memory_gib"] for row in rows) * 2**30
            seconds = self.batching.tokens_per_step / rate
            counted = counted_bytes(rows[-1])
            on_gpu = self.components.device.type == "cuda"
            peak = peak if on_gpu else 0.0  # elsewhere it is that of the process, which nothing predicts
            lines = record_measurement(self.config.out, step_seconds=seconds, peak_bytes=peak, categories=counted)
            for line in lines if on_gpu else ():
                self.reports.say(f"prediction: {line}; piledriver plan --learn {self.config.out} refits")

    def _last_loss(self) -> float:
        """Return the loss of the last step, from the metrics if this start ran none; NaN if unknown."""
        if self.reports.last is not None:
            return self.reports.last.loss
        rows = read_metrics(self.config.out)
        return math.nan if not rows or rows[-1]["loss"] is None else float(rows[-1]["loss"])

    def _loop(self, step: int, request: StopRequest) -> tuple[int, int]:
        """Train until the budget is used or a rank votes to stop; return the step reached and the steps run."""
        count = 0
        while step < self.total_steps:
            begun = time.monotonic()
            self._before_step(step)
            learning_rate = self.scheduler.get_last_lr()[0]  # of this step: running it advances the schedule
            taken = self._step(step, StopSaveVote(stop=request.asked, save=self.saving.is_late()))
            step, count = step + 1, count + 1
            self.ranks.step(step, seconds=time.monotonic() - begun, data_seconds=self.position.take_wait())
            self.look_for_leaks()
            skipped = self.position.skipped_batches
            self.reports.add(step, taken, begun=begun, learning_rate=learning_rate, skipped_batches=skipped)
            if self.config.spikes.rolls_back and taken.result().broken:
                step = self._roll_back(step, taken.result().loss)
                continue
            self._check_recovers(step)
            if self._is_time_to_validate(step):
                self.reports.flush(self._validated(step))
            elif self.train_step.waits:
                self.reports.flush()
            # One process acts on its own vote; several act on the reduced votes, which all ranks read alike.
            alone = StopSaveVote(stop=request.asked, save=self.saving.is_late())
            stop, late = self.reports.vote if self.world.is_distributed else alone
            if stop:
                self.reports.flush()
                step = self._step_to_stop_at(step)
            if stop or self.saving.is_due(step, late) or step == self.total_steps:
                self.reports.flush()
                self.saving.save(step)
                self.reports.vote = StopSaveVote()
            if stop:
                break
        return step, count

    def _step(self, step: int, vote: StopSaveVote) -> PendingStep:
        return self.train_step.run(step, vote)

    def _before_step(self, step: int) -> None:
        """Skip windows that roll-backs excluded, and take a snapshot if one is due."""
        self.position.skip_windows(step)
        spikes = self.config.spikes
        if spikes.rolls_back and (self.snapshot.step < 0 or step % spikes.snapshot_steps == 0):
            self.snapshot.take(step, self.position.window)

    def _check_recovers(self, step: int) -> None:
        """Raise an error if only spikes were reported for too long; the last report is of the step before `step`."""
        most, last = self.config.spikes.max_skips, self.reports.last
        if self.config.spikes.action != "skip" or last is None or self.reports.spikes_in_a_row < most:
            return
        raise PiledriverError(
            f"the updates of {most} steps in a row up to {step - 1} were skipped; the last loss is {last.loss:.4g}",
            fix=f"start again with a lower optimizer.lr, or remove checkpoints from step {step - most} on and resume "
            "with spikes.action=rollback",
        )

    def _roll_back(self, step: int, loss: float) -> int:
        """Restore the last snapshot and skip every batch since; return its step."""
        back, spikes, skips = self.snapshot, self.config.spikes, self.position.skips
        if skips.times_from(back.step) >= spikes.max_rollbacks:
            raise PiledriverError(
                f"rolled back to step {back.step} {spikes.max_rollbacks} times; the loss of step {step} is {loss:.4g}",
                fix="lower optimizer.lr, or look at the data with piledriver trace",
            )
        windows = self.position.window - back.window
        batches = windows // self.batching.windows_per_step
        skip = Skip(
            step=back.step, window=back.window, windows=windows, batches=batches, seen_at=step, loss=f"{loss:.6g}"
        )
        skips.add(skip, write=self.world.is_main)
        back.restore()
        self.position.record(back.step)
        self.reports.flush(rolled_back_to=back.step)
        self.reports.say(f"rolled back to step {back.step}; {batches} batches are skipped, see skipped.json")
        return back.step

    def _step_to_stop_at(self, step: int) -> int:
        """Return the step to save when stopping; with roll-backs that is a snapshot, which is restored first."""
        spikes = self.config.spikes
        if not spikes.rolls_back or step % spikes.snapshot_steps == 0 or step == self.total_steps:
            return step
        self.snapshot.restore()
        self.position.seek(self.snapshot.window)
        return self.snapshot.step

    def _is_time_to_validate(self, step: int) -> bool:
        every = self.config.validate_steps or validation_interval(self.total_steps)
        return self.validate is not None and (step % every == 0 or step == self.total_steps)

    def _validated(self, step: int) -> dict[str, float]:
        """Return validation metrics of the model in its layout; replicas share the documents. Write samples."""
        assert self.validate is not None
        self.model.eval()
        figures = self.validate(self.model, self.world)
        try:
            write_samples(self.config.out, step, self.sample(self.model, self.world) if self.sample else [])
        except Exception as error:  # samples are for reading: they must not end a run
            self.sample = None
            self.reports.say(f"no more samples: {type(error).__name__}: {error}")
        self.model.train()
        return {f"validation/{name}": value for name, value in figures.items()}
