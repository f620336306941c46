"""The pretraining loop: tokens in, a trained model in a run folder out, the same whatever happens on the way.

The position in the data is the step; the order of windows is arithmetic; a checkpoint holds everything else. So a run
that was killed and started again, on the same or another number of processes, takes the same steps.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from piledriver.accelerator import Accelerator
from piledriver.checkpoint import Checkpointer, Contents, folder_for, is_complete, latest, read_header
from piledriver.core import storage
from piledriver.core.config import save_config, to_mapping
from piledriver.core.errors import MissingDependencyError, PiledriverError
from piledriver.data.record import record_stream
from piledriver.data.stream import StreamConfig, TokenStream, open_stream
from piledriver.data.token_loader import TokenBatch, TokenLoader, to_tensors
from piledriver.models import Transformer, learning_rate_scales, make_masks
from piledriver.models.interchange import save_folder
from piledriver.models.presets import preset
from piledriver.models.sizes import flops_per_token, parameter_count
from piledriver.observe.flops import peak_flops
from piledriver.observe.memory import memory_use
from piledriver.observe.trackers import choose
from piledriver.optim import ScheduleConfig, ScheduledLR, build_optimizer
from piledriver.runtime.collectives import any_rank, gather_object
from piledriver.runtime.seeds import set_seed
from piledriver.runtime.world import World
from piledriver.train.batching import cut_batch
from piledriver.train.config import TrainConfig
from piledriver.train.display import Display, display
from piledriver.train.metrics import metric_log
from piledriver.train.plots import save_plots
from piledriver.train.rollback import Skip, SkipList, Snapshot
from piledriver.train.spikes import SpikeWatch
from piledriver.train.stopping import stop_on_signals
from piledriver.train.text import make_tokens

CHECKPOINTS, CONFIG, MODEL = "checkpoints", "config.yaml", "model"
Validate = Callable[[Transformer, World], dict[str, float]]


@dataclass(frozen=True)
class RunSummary:
    """How a run ended."""

    out: str
    steps: int
    tokens: int
    loss: float
    finished: bool
    """False where it was asked to stop before its budget was used up."""
    skipped_batches: int
    """Batches that were read and are not in the weights: updates left out, and what a roll-back passed over."""
    tokens_per_second: float


@dataclass(frozen=True)
class _Result:
    """What came of one step."""

    loss: float
    norm: float
    skipped: bool
    """Its update was left out."""
    broken: bool
    """The loss, or the gradient, went wrong."""


def train(config: TrainConfig, *, validate: Validate | None = None) -> RunSummary:
    """Train, or go on with a run that was interrupted. `validate` gives figures by name for the model as it is."""
    return _Run(config, validate).go()


class _Run:
    """One run's parts, made in the order in which they need each other."""

    def __init__(self, config: TrainConfig, validate: Validate | None) -> None:
        self.config, self.validate = config, validate
        choose([*(config.trackers or ())], logging_dir=config.out)  # a name that is none, before any work
        self.accelerator = self._make_accelerator()
        self.world = self.accelerator.world
        meshes = self.accelerator.meshes
        # Processes that split a matrix, a sequence or the blocks among them read the same batch.
        self.data_rank = self.world.rank if meshes is None else meshes.data_rank
        self.data_size = self.world.size if meshes is None else meshes.layout.data_size
        self.device = self.accelerator.device
        set_seed(config.seed)
        torch.use_deterministic_algorithms(config.deterministic, warn_only=not config.deterministic)
        self.shape = preset(config.model) if isinstance(config.model, str) else config.model
        seq_len = config.data.seq_len or self.shape.max_positions
        self.batching = cut_batch(
            config.batch_tokens, seq_len, self.data_size, config.micro_batch_tokens, self.device.type
        )
        self.accelerator.gradient_accumulation_steps = self.batching.accumulation
        self.stream = self._open_stream(seq_len)
        self.model = self._make_model()
        self.watch = SpikeWatch(config.spikes)
        self.skips = SkipList(config.out)
        self.saver = Checkpointer()
        self.peak = self._peak_flops()
        self.flops_per_token = flops_per_token(self.shape, seq_len)

    def _make_accelerator(self) -> Accelerator:
        layout = self.config.layout
        if layout is None:
            return Accelerator(mixed_precision="fp16" if self.config.precision == "fp16" else "no")
        compiled = self.config.compile
        return Accelerator(layout=layout if compiled is None else replace(layout, compile=compiled))

    def _open_stream(self, seq_len: int) -> TokenStream:
        data = self.config.data
        self.tokens = make_tokens(self.config, self.shape.vocab_size, self.world)
        wanted = StreamConfig(
            tokens=self.tokens,
            seq_len=seq_len,
            seed=self.config.seed,
            packing=data.packing,
            mixture=data.mixture,
            exclude_sources=data.exclude_sources,
            exclude_licences=data.exclude_licences,
        )
        return open_stream(wanted, vocab_size=self.shape.vocab_size)

    def _make_model(self) -> Transformer:
        model = Transformer(self.shape, seed=self.config.seed).to(self.device)
        precision = self.config.precision
        # A layout sets its own when it is applied.
        if self.config.layout is None and (precision == "bf16" or (precision == "auto" and self.device.type == "cuda")):
            model.compute_dtype = torch.bfloat16
        model.z_loss = self.config.z_loss
        return model

    def _peak_flops(self) -> float | None:
        """What MFU is a part of, from the device's datasheet; what a CPU could do depends on who else uses it."""
        if self.device.type != "cuda":
            return None
        layout = self.config.layout
        wide = self.model.compute_dtype is None if layout is None else layout.precision == "fp32"
        return peak_flops(torch.cuda.get_device_name(), torch.float32 if wide else torch.bfloat16)

    def go(self) -> RunSummary:
        """Set up, resume, loop, finish."""
        config = self.config
        # A layout says itself what of it is compiled.
        wanted = config.compile if config.compile is not None else self.device.type == "cuda"
        if wanted and config.layout is None:
            self.model.compile()
        total_steps = self._total_steps()
        optimizer = build_optimizer(self.model, config.optimizer, lr_scales=learning_rate_scales(self.model))
        schedule = config.schedule or _default_schedule(total_steps)
        scheduler = ScheduledLR(
            optimizer, schedule, amount=self.batching.tokens_per_step if schedule.unit == "tokens" else 1
        )
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(self.model, optimizer, scheduler)
        self.loader = TokenLoader(
            self.stream,
            batch_size=self.batching.windows_per_micro_batch,
            rank=self.data_rank,
            size=self.data_size,
            device=self.device,
        )
        self.contents = Contents(
            models=[self.model],
            optimizers=[self.optimizer],
            schedulers=[self.scheduler],
            loaders=[self.loader],
            custom=[self.watch],
            scaler=self.accelerator.scaler,
        )
        stateful = [self.scheduler, self.watch, *([self.accelerator.scaler] if self.accelerator.scaler else [])]
        self.snapshot = Snapshot(self.model, self.optimizer, stateful)
        first_step = self._resume()
        if self.world.is_main:
            save_config(config, os.path.join(config.out, CONFIG))
            self._record(first_step)
        self._batches = self._read()
        try:
            return self._loop(first_step, total_steps)
        finally:
            self._batches.close()

    def _read(self) -> Generator[TokenBatch]:
        return cast(Generator[TokenBatch], iter(self.loader))

    def _record(self, step: int) -> None:
        """Note where the data of the steps from here on comes from, for `piledriver trace`."""
        record_stream(
            self.config.out,
            self.stream,
            windows_per_step=self.batching.windows_per_step,
            step=step,
            cursor=self.loader.cursor,
        )

    def _total_steps(self) -> int:
        """Steps in the budget. A budget in time is laid out once, by what a step costs here, and kept when resuming."""
        if self.config.budget_tokens is not None:
            return max(1, self.config.budget_tokens // self.batching.tokens_per_step)
        header = self._latest_header()
        if header is not None:
            return int(header["total_steps"])
        assert self.config.budget_minutes is not None
        return max(1, int(60 * self.config.budget_minutes / self._probed_seconds()))

    def _probed_seconds(self) -> float:
        """What an optimizer step costs, from forward and backward passes that leave no trace."""
        size = self.batching.windows_per_micro_batch
        batch = to_tensors(self.stream.read(0, size), 0, self.device)
        seconds = math.inf
        for _ in range(3):
            begun = time.monotonic()
            sums = self.model(batch.inputs, targets=batch.labels, masks=self._masks(batch))
            (sums.total / sums.tokens).backward()
            float(sums.tokens)  # waits for the device
            seconds = min(seconds, time.monotonic() - begun)
        self.model.zero_grad(set_to_none=True)
        # The slowest process sets the pace of all; a tenth is for the optimizer and the rest.
        slowest = max(gather_object(self.world, seconds)) if self.world.is_distributed else seconds
        return 1.1 * self.batching.accumulation * slowest

    def _latest_header(self) -> dict[str, Any] | None:
        found = latest(os.path.join(self.config.out, CHECKPOINTS))
        return None if found is None else dict(read_header(found).extra)

    def _resume(self) -> int:
        found = latest(os.path.join(self.config.out, CHECKPOINTS))
        if found is None:
            return 0
        report = self.saver.load(found, self.contents)
        return int(report.step or 0)

    def _loop(self, first_step: int, total_steps: int) -> RunSummary:
        config = self.config
        about = {"model": str(config.model), "batch_tokens": config.batch_tokens}
        validate_every = config.validate_steps or max(1, total_steps // 10)
        started, taken, loss, stopped = time.monotonic(), 0, math.nan, False
        last_saved, step = started, first_step
        with (
            stop_on_signals() as request,
            metric_log(config.out, config.trackers, is_main=self.world.is_main, config=about) as metrics,
            display(
                self.shape_name, first_step=first_step, total_steps=total_steps, is_main=self.world.is_main
            ) as shown,
        ):
            while step < total_steps:
                begun = time.monotonic()
                self._enter(step)
                result = self._step(step)
                loss, taken = result.loss, taken + 1
                step += 1
                figures = self._figures(step, result, time.monotonic() - begun)
                if result.broken:
                    shown.say(f"step {step}: loss {loss:.4g}, gradient norm {result.norm:.4g}: {self._will()}")
                if result.broken and config.spikes.action == "rollback":
                    step = self._roll_back(step, loss, shown)
                    metrics.write({**figures, "rolled_back_to": step})
                    continue
                if self.validate is not None and (step % validate_every == 0 or step == total_steps):
                    figures |= {f"validation/{name}": value for name, value in self._validated().items()}
                if step % config.log_steps == 0 or step == total_steps or result.broken:
                    metrics.write(figures)
                shown.show(figures)
                stopped = any_rank(self.world, request.asked)
                if stopped:
                    step = self._step_to_stop_at(step, total_steps)
                if stopped or self._is_time_to_save(step, last_saved) or step == total_steps:
                    self._save(step, total_steps)
                    last_saved = time.monotonic()
                if stopped:
                    break
            self.saver.wait()
        if step == total_steps:
            self._publish()
        if self.world.is_main and config.plots:
            _plotted(config.out)
        seconds = max(1e-9, time.monotonic() - started)
        return RunSummary(
            out=config.out,
            steps=step,
            tokens=step * self.batching.tokens_per_step,
            loss=loss,
            finished=step == total_steps,
            skipped_batches=self._skipped_batches(),
            tokens_per_second=taken * self.batching.tokens_per_step / seconds,
        )

    @property
    def shape_name(self) -> str:
        """What the progress bar calls the model."""
        name = self.config.model if isinstance(self.config.model, str) else "model"
        return f"{name} ({parameter_count(self.shape) / 1e6:.1f}M)"

    def _window(self) -> int:
        """The next window of the endless stream."""
        return self.stream.index_of(self.loader.cursor)

    def _enter(self, step: int) -> None:
        """What comes before a step: pass over what is to be left out, keep a snapshot where one is due."""
        window = self._window()
        after = self.skips.after(window)
        if after != window:
            self._go_to(after)
            if self.world.is_main:
                self._record(step)
        spikes = self.config.spikes
        if spikes.action == "rollback" and (self.snapshot.step < 0 or step % spikes.snapshot_steps == 0):
            self.snapshot.take(step, after)

    def _go_to(self, window: int) -> None:
        self._batches.close()
        cursor = self.stream.advance(self.stream.start, window)
        self.loader.load_state_dict({"cursor": cursor.to_bytes()})
        self._batches = self._read()

    def _roll_back(self, step: int, loss: float, shown: Display) -> int:
        """Be as at the last snapshot, and leave out every batch since: one of them led here. The step to go on with."""
        back, spikes = self.snapshot, self.config.spikes
        if self.skips.times_from(back.step) >= spikes.max_rollbacks:
            raise PiledriverError(
                f"went back to step {back.step} {spikes.max_rollbacks} times; the loss of step {step} is {loss:.4g}",
                fix="other batches do not help: lower optimizer.lr, or look at the data with piledriver trace",
            )
        windows = self._window() - back.window
        batches = windows // self.batching.windows_per_step
        skip = Skip(
            step=back.step, window=back.window, windows=windows, batches=batches, seen_at=step, loss=f"{loss:.6g}"
        )
        self.skips.add(skip, write=self.world.is_main)
        back.restore()
        if self.world.is_main:
            self._record(back.step)
        shown.say(f"back to step {back.step}; {batches} batches are left out, and noted in skipped.json")
        return back.step

    def _step_to_stop_at(self, step: int, total_steps: int) -> int:
        """This one, or the last that could be gone back to: a resumed run must be able to go back to the same."""
        spikes = self.config.spikes
        if spikes.action != "rollback" or step % spikes.snapshot_steps == 0 or step == total_steps:
            return step
        self.snapshot.restore()
        self._go_to(self.snapshot.window)
        return self.snapshot.step

    def _step(self, step: int) -> _Result:
        """One optimizer step on the mean loss over every token of the global batch, left out if it went wrong."""
        self.model.train()
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        tokens = torch.zeros((), dtype=torch.float64, device=self.device)
        for _ in range(self.batching.accumulation):
            batch = next(self._batches)
            with self.accelerator.accumulate(self.model, count=batch.labels.ne(-100).sum()):
                sums = self.model(batch.inputs, targets=batch.labels, masks=self._masks(batch))
                self.accelerator.backward(sums.total / sums.tokens)
            nats += sums.cross_entropy.double()
            tokens += sums.tokens.double()
        totals = self.accelerator.reduce(torch.stack([nats, tokens]), "sum")
        loss = float(totals[0] / totals[1])
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip))
        # Scaled gradients overflow now and then, which the scaler sees to; any others that do are broken.
        broken = self.watch.is_broken(step, loss, norm if self.accelerator.scaler is None else None)
        action = self.config.spikes.action
        if broken and action == "stop":
            raise PiledriverError(
                f"the loss of step {step} is {loss} (gradient norm {norm})",
                fix="lower optimizer.lr, or spikes.action=skip",
            )
        skipped = broken and action in ("skip", "rollback")
        if not skipped:
            self.optimizer.step()
            skipped = self.accelerator.scaler is not None and self.accelerator.optimizer_step_was_skipped
        if not (broken and action == "rollback"):
            self.watch.left_out += skipped
            # A skipped step is a step of the schedule too: the learning rate is a function of the step alone.
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return _Result(loss, norm, skipped, broken)

    def _will(self) -> str:
        return {"log": "noted", "skip": "its update is left out", "rollback": "going back"}[self.config.spikes.action]

    def _skipped_batches(self) -> int:
        return self.watch.left_out + self.skips.batches_before(self._window())

    def _masks(self, batch: TokenBatch) -> Any:
        if self.config.data.packing == "joined":
            return None
        return make_masks(self.shape, self.batching.seq_len, self.device, batch.document_ids())

    def _figures(self, step: int, result: _Result, seconds: float) -> dict[str, Any]:
        rate = self.batching.tokens_per_step / max(seconds, 1e-9)
        memory = memory_use(self.device)
        return {
            "step": step,
            "tokens": step * self.batching.tokens_per_step,
            "loss": result.loss if math.isfinite(result.loss) else None,
            "gradient_norm": result.norm,
            "learning_rate": self.scheduler.get_last_lr()[0],
            "tokens_per_second": rate,
            **({} if self.peak is None else {"mfu": self.flops_per_token * rate / (self.peak * self.world.size)}),
            "memory_gib": (memory.device_peak or memory.host_rss) / 2**30,
            "skipped": result.skipped,
            "skipped_batches": self._skipped_batches(),
        }

    def _validated(self) -> dict[str, float]:
        """Each process scores a share of the documents, with the whole model."""
        assert self.validate is not None
        model = self._whole_model()
        model.eval()
        figures = self.validate(model, self.world)
        self.model.train()
        return figures

    def _whole_model(self) -> Transformer:
        """The model itself, or a whole copy of one that is laid out over processes."""
        if self.accelerator.meshes is None:
            return self.model
        whole = self._make_model()
        whole.load_state_dict(self.accelerator.get_state_dict(self.model))
        return whole

    def _is_time_to_save(self, step: int, last_saved: float) -> bool:
        if self.config.checkpoint_steps is not None:
            return step % self.config.checkpoint_steps == 0
        spikes = self.config.spikes
        if spikes.action == "rollback" and step % spikes.snapshot_steps:
            return False
        due = time.monotonic() - last_saved > 60 * self.config.checkpoint_minutes
        # Clocks differ between processes; saving is something that all of them do together.
        return any_rank(self.world, due)

    def _save(self, step: int, total_steps: int) -> None:
        folder = folder_for(os.path.join(self.config.out, CHECKPOINTS), step, style="step-{}")
        if is_complete(folder):
            return  # went back to where it was saved already
        extra = {"total_steps": total_steps, "batching": asdict(self.batching)}
        meshes = self.accelerator.meshes
        self.saver.save(
            folder,
            self.contents,
            step=step,
            layout=None if meshes is None else to_mapping(meshes.layout),
            extra=extra,
            asynchronous=True,
            total_limit=self.config.keep_checkpoints,
        )

    def _publish(self) -> None:
        """The finished model as a folder that `transformers` and `piledriver evaluate` read, with its tokenizer."""
        folder, model = os.path.join(self.config.out, MODEL), self._whole_model()
        if not self.world.is_main:
            return
        save_folder(model, folder)
        for name in os.listdir(self.tokens):
            if name.startswith("tokenizer"):
                content = storage.read_bytes(os.path.join(self.tokens, name))
                storage.write_bytes(os.path.join(folder, name), content)


def _default_schedule(total_steps: int) -> ScheduleConfig:
    warmup = min(max(1, total_steps // 50), total_steps - 1)
    return ScheduleConfig(kind="cosine", warmup=warmup, total=total_steps, floor=0.1)


def _plotted(out: str) -> None:
    # Pictures are an extra; the metrics are there.
    with suppress(MissingDependencyError):
        save_plots(out)
