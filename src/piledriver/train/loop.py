"""The pretraining loop: tokens in, a trained model in a run folder out, the same whatever happens on the way.

The position in the data is the step; the order of windows is arithmetic; a checkpoint holds everything else. So a run
that was killed and started again, on the same or another number of processes, takes the same steps.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from piledriver.accelerator import Accelerator
from piledriver.checkpoint import Checkpointer, Contents, folder_for, latest, read_header
from piledriver.core import storage
from piledriver.core.config import save_config
from piledriver.core.errors import PiledriverError
from piledriver.core.progress import progress
from piledriver.data.record import record_stream
from piledriver.data.stream import StreamConfig, TokenStream, open_stream
from piledriver.data.token_loader import TokenBatch, TokenLoader, to_tensors
from piledriver.models import Transformer, learning_rate_scales, make_masks
from piledriver.models.interchange import save_folder
from piledriver.models.presets import preset
from piledriver.models.sizes import flops_per_token, parameter_count
from piledriver.observe.flops import peak_flops
from piledriver.observe.trackers import TrackerHub, choose, make_trackers
from piledriver.optim import ScheduleConfig, ScheduledLR, build_optimizer
from piledriver.runtime.collectives import any_rank, gather_object
from piledriver.runtime.seeds import set_seed
from piledriver.train.batching import cut_batch
from piledriver.train.config import TrainConfig
from piledriver.train.spikes import SpikeWatch
from piledriver.train.stopping import stop_on_signals

CHECKPOINTS, METRICS, CONFIG, MODEL = "checkpoints", "metrics.jsonl", "config.yaml", "model"
Validate = Callable[[Transformer], dict[str, float]]


@dataclass(frozen=True)
class RunSummary:
    """How a run ended."""

    out: str
    steps: int
    tokens: int
    loss: float
    finished: bool
    """False where it was asked to stop before its budget was used up."""
    skipped_steps: int
    tokens_per_second: float


def train(config: TrainConfig, *, validate: Validate | None = None) -> RunSummary:
    """Train, or go on with a run that was interrupted. `validate` gives figures by name for the model as it is."""
    return _Run(config, validate).go()


class _Run:
    """One run's parts, made in the order in which they need each other."""

    def __init__(self, config: TrainConfig, validate: Validate | None) -> None:
        self.config, self.validate = config, validate
        self.accelerator = Accelerator(mixed_precision="fp16" if config.precision == "fp16" else "no")
        self.world = self.accelerator.world
        self.device = self.accelerator.device
        set_seed(config.seed)
        torch.use_deterministic_algorithms(config.deterministic, warn_only=not config.deterministic)
        self.shape = preset(config.model) if isinstance(config.model, str) else config.model
        seq_len = config.data.seq_len or self.shape.max_positions
        self.batching = cut_batch(
            config.batch_tokens, seq_len, self.world.size, config.micro_batch_tokens, self.device.type
        )
        self.accelerator.gradient_accumulation_steps = self.batching.accumulation
        self.stream = self._open_stream(seq_len)
        self.model = self._make_model()
        self.watch = SpikeWatch(config.spikes)
        self.saver = Checkpointer()

    def _open_stream(self, seq_len: int) -> TokenStream:
        data = self.config.data
        wanted = StreamConfig(
            tokens=data.tokens,
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
        if precision == "bf16" or (precision == "auto" and self.device.type == "cuda"):
            model.compute_dtype = torch.bfloat16
        model.z_loss = self.config.z_loss
        return model

    def go(self) -> RunSummary:
        """Set up, resume, loop, finish."""
        config = self.config
        total_steps = self._total_steps()
        optimizer = build_optimizer(self.model, config.optimizer, lr_scales=learning_rate_scales(self.model))
        schedule = config.schedule or ScheduleConfig(
            kind="cosine", warmup=max(1, total_steps // 50), total=total_steps, floor=0.1
        )
        scheduler = ScheduledLR(optimizer, schedule)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(self.model, optimizer, scheduler)
        self.loader = TokenLoader(
            self.stream,
            batch_size=self.batching.windows_per_micro_batch,
            rank=self.world.rank,
            size=self.world.size,
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
        first_step = self._resume()
        if self.world.is_main:
            save_config(config, os.path.join(config.out, CONFIG))
            record_stream(
                config.out,
                self.stream,
                windows_per_step=self.batching.windows_per_step,
                step=first_step,
                cursor=self.loader.cursor,
            )
        if config.compile if config.compile is not None else self.device.type == "cuda":
            self.model.compile()
        return self._loop(first_step, total_steps)

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
        batches = iter(self.loader)
        hub = self._trackers()
        last_saved = time.monotonic()
        validate_every = config.validate_steps or max(1, total_steps // 10)
        started, loss, stopped = time.monotonic(), math.nan, False
        step = first_step
        with stop_on_signals() as request, progress(f"train {self.shape_name}", total=total_steps, unit="steps") as bar:
            bar.advance(first_step)
            metrics = open(os.path.join(config.out, METRICS), "a", encoding="utf-8") if self.world.is_main else None
            while step < total_steps:
                begun = time.monotonic()
                loss, norm, skipped = self._step(step, batches)
                step += 1
                seconds = time.monotonic() - begun
                figures = self._figures(step, loss, norm, skipped, seconds)
                if self.validate is not None and (step % validate_every == 0 or step == total_steps):
                    figures |= {f"validation/{name}": value for name, value in self._validated().items()}
                if metrics is not None and (step % config.log_steps == 0 or step == total_steps):
                    metrics.write(json.dumps(figures) + "\n")
                    metrics.flush()
                    hub.log(figures, step=step)
                bar.advance()
                bar.note(f"loss {loss:.3f}, {figures['tokens_per_second']:.0f} tokens/s")
                stopped = any_rank(self.world, request.asked)
                if stopped or self._is_time_to_save(step, last_saved) or step == total_steps:
                    self._save(step, total_steps)
                    last_saved = time.monotonic()
                if stopped:
                    break
            if metrics is not None:
                metrics.close()
        self.saver.wait()
        hub.finish()
        if self.world.is_main and step == total_steps:
            self._publish()
        seconds = max(1e-9, time.monotonic() - started)
        taken = (step - first_step) * self.batching.tokens_per_step
        return RunSummary(
            out=config.out,
            steps=step,
            tokens=step * self.batching.tokens_per_step,
            loss=loss,
            finished=step == total_steps,
            skipped_steps=self.watch.count,
            tokens_per_second=taken / seconds,
        )

    @property
    def shape_name(self) -> str:
        """What the progress bar calls the model."""
        name = self.config.model if isinstance(self.config.model, str) else "model"
        return f"{name} ({parameter_count(self.shape) / 1e6:.1f}M)"

    def _step(self, step: int, batches: Iterator[TokenBatch]) -> tuple[float, float, bool]:
        """One optimizer step: mean loss over every token of the global batch, gradient norm, whether it was skipped."""
        self.model.train()
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        tokens = torch.zeros((), dtype=torch.float64, device=self.device)
        for _ in range(self.batching.accumulation):
            batch = next(batches)
            with self.accelerator.accumulate(self.model, count=batch.labels.ne(-100).sum()):
                sums = self.model(batch.inputs, targets=batch.labels, masks=self._masks(batch))
                self.accelerator.backward(sums.total / sums.tokens)
            nats += sums.cross_entropy.double()
            tokens += sums.tokens.double()
        totals = self.accelerator.reduce(torch.stack([nats, tokens]), "sum")
        loss = float(totals[0] / totals[1])
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip))
        bad = self.watch.is_spike(step, loss) or not math.isfinite(norm)
        if bad and self.config.spikes.action == "stop":
            raise PiledriverError(
                f"the loss of step {step} is {loss} (gradient norm {norm})",
                fix="lower optimizer.lr, or spikes.action=skip",
            )
        skipped = bad and self.config.spikes.action == "skip"
        if not skipped:
            self.optimizer.step()
        # A skipped step is a step of the schedule too: the learning rate is a function of the step alone.
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm, skipped

    def _masks(self, batch: TokenBatch) -> Any:
        if self.config.data.packing == "joined":
            return None
        return make_masks(self.shape, self.batching.seq_len, self.device, batch.document_ids())

    def _figures(self, step: int, loss: float, norm: float, skipped: bool, seconds: float) -> dict[str, Any]:
        rate = self.batching.tokens_per_step / max(seconds, 1e-9)
        figures: dict[str, Any] = {
            "step": step,
            "tokens": step * self.batching.tokens_per_step,
            "loss": loss,
            "gradient_norm": norm,
            "learning_rate": self.scheduler.get_last_lr()[0],
            "tokens_per_second": rate,
            "skipped": skipped,
        }
        peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16) if self.device.type == "cuda" else None
        if peak:
            flops = flops_per_token(self.shape, self.batching.seq_len) * rate
            figures["mfu"] = flops / (peak * self.world.size)
            figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return figures

    def _validated(self) -> dict[str, float]:
        assert self.validate is not None
        self.model.eval()
        return self.validate(self.model)

    def _is_time_to_save(self, step: int, last_saved: float) -> bool:
        if self.config.checkpoint_steps is not None:
            return step % self.config.checkpoint_steps == 0
        due = time.monotonic() - last_saved > 60 * self.config.checkpoint_minutes
        # Clocks differ between processes; saving is something that all of them do together.
        return any_rank(self.world, due)

    def _save(self, step: int, total_steps: int) -> None:
        folder = folder_for(os.path.join(self.config.out, CHECKPOINTS), step, style="step-{}")
        extra = {"total_steps": total_steps, "batching": asdict(self.batching)}
        self.saver.save(
            folder, self.contents, step=step, extra=extra, asynchronous=True, total_limit=self.config.keep_checkpoints
        )

    def _publish(self) -> None:
        """The finished model as a folder that `transformers` and `piledriver evaluate` read, with its tokenizer."""
        folder = os.path.join(self.config.out, MODEL)
        save_folder(self.model, folder)
        for name in os.listdir(self.config.data.tokens):
            if name.startswith("tokenizer"):
                content = storage.read_bytes(os.path.join(self.config.data.tokens, name))
                storage.write_bytes(os.path.join(folder, name), content)

    def _trackers(self) -> TrackerHub:
        names = [name for name in self.config.trackers if name != "jsonl"]
        chosen = choose(names, logging_dir=self.config.out) if names else []
        hub = TrackerHub(make_trackers(chosen, "piledriver", self.config.out, {}), is_main=self.world.is_main)
        hub.start(config={"model": str(self.config.model), "batch_tokens": self.config.batch_tokens})
        return hub
