"""Config of a training run: a model, data, a global batch and a budget; the rest has defaults or is derived."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from piledriver.core.errors import ConfigError
from piledriver.data.stream.token_stream import Packing, masks_documents
from piledriver.engine import Layout
from piledriver.models.config import ModelConfig
from piledriver.optim import OptimizerConfig, ScheduleConfig

_POSITIVE = (
    "batch_tokens",
    "budget_tokens",
    "budget_minutes",
    "micro_batch_tokens",
    "checkpoint_minutes",
    "checkpoint_steps",
    "keep_checkpoints",
    "validate_steps",
    "log_steps",
    "clip",
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training data: a corpus or token shards, how documents are packed, the mixture of sources."""

    corpus: str | None = None
    """Text: a shard, a folder of shards, or the output of `piledriver corpus build`; tokenised into the run folder."""
    tokenizer: str | None = None
    """Tokenizer of the corpus; default: one of the model's vocabulary size, trained on the corpus."""
    tokens: str | None = None
    """Folder of token shards that `piledriver tokenize` wrote, instead of a corpus."""
    seq_len: int | None = None
    """Tokens in a window; default: the model's max_positions."""
    packing: Packing = "packed"
    """How documents fill windows: packed, joined, document or best_fit; see StreamConfig."""
    mixture: dict[str, float] | None = None
    """Weight of each source; default: in proportion to its tokens."""
    exclude_sources: tuple[str, ...] = ()
    """Sources whose documents are skipped."""
    exclude_licences: tuple[str, ...] = ()
    """Licences whose documents are skipped."""

    def __post_init__(self) -> None:
        if (self.corpus is None) == (self.tokens is None):
            raise ConfigError(
                "give one of data.corpus and data.tokens", fix="data.corpus for text, data.tokens for token shards"
            )
        if self.tokenizer is not None and self.corpus is None:
            raise ConfigError("data.tokenizer needs data.corpus", fix="remove it: token shards have their tokenizer")


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """What counts as a loss spike, and what is done about it."""

    factor: float = 2.0
    """A loss is a spike if it exceeds its running mean by this factor times its spread; NaN always is."""
    action: Literal["log", "skip", "rollback", "stop"] = "skip"
    """log: only report it; skip: skip the update; rollback: restore the last snapshot and skip every batch since; stop:
    end the run with an error."""
    warmup_steps: int = 50
    """First step at which spikes are detected: losses change fast before it."""
    max_skips: int = 100
    """With skip: end the run after this many skipped updates in a row. Without updates the loss does not recover."""
    snapshot_steps: int = 20
    """With rollback: steps between snapshots of weights and optimizer in host memory."""
    max_rollbacks: int = 5
    """With rollback: end the run after this many roll-backs to the same step."""

    def __post_init__(self) -> None:
        for name in ("factor", "max_skips", "snapshot_steps", "max_rollbacks"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"spikes.{name} is {getattr(self, name)}", fix="it must be positive")

    @property
    def rolls_back(self) -> bool:
        """Whether a spike restores the last snapshot."""
        return self.action == "rollback"

    @property
    def skips_update(self) -> bool:
        """Whether the update of a spike is not applied."""
        return self.action in ("skip", "rollback")

    @property
    def stops(self) -> bool:
        """Whether a spike ends the run."""
        return self.action == "stop"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    model: str | ModelConfig
    """A preset by name, a model config, or the path of a Hugging Face folder, whose weights and tokenizer are then the
    initial ones."""
    data: DataConfig
    batch_tokens: int
    """Tokens in one optimizer step, over all ranks."""
    budget_tokens: int | None = None
    """Length of the run in tokens."""
    budget_minutes: float | None = None
    """Length of the run in minutes, converted to steps once by timing the first passes."""
    out: str = "run"
    """The run folder; if it holds checkpoints, the run resumes from the last one."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig | None = None
    """Learning-rate schedule; default: warm-up over 2% of the steps, then a cosine to a tenth."""
    clip: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    z_loss: float = 0.0
    """Weight of the squared log-partition function in the loss."""
    layout: Layout = field(default_factory=lambda: Layout(precision="auto"))
    """How the model is placed on ranks and computed, for example {zero: 3, tp: 2, precision: bf16, compile: blocks}. By
    default a replica per rank; precision bf16 on a GPU, fp32 on a CPU; compiled on a GPU."""
    micro_batch_tokens: int | None = None
    """Tokens in a micro-batch of one rank; default: 32768 on a GPU, 4096 on a CPU, or fewer."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints."""
    checkpoint_steps: int | None = None
    """Steps between checkpoints, instead of minutes."""
    keep_checkpoints: int = 2
    """Number of latest checkpoints kept on disk."""
    validate_steps: int | None = None
    """Steps between validations; default: a tenth of the run."""
    log_steps: int = 1
    """Steps between lines of metrics.jsonl."""
    keep_zeros: bool = False
    """Weights of blocks that are zero in the model folder stay zero: train a pruned model."""
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    trackers: tuple[str, ...] | None = None
    """Trackers besides the run folder's metrics.jsonl (wandb, ...); default: TensorBoard if installed; [] for none."""
    monitor_seconds: float = 5.0
    """Seconds between samples of processor, memory, GPU, disk, network and energy, on every rank; 0 for none."""
    leaks: bool = True
    """Watch for memory, files and threads that grow with every step, and name the line that makes them grow."""
    plots: bool = True
    """Draw plots/*.png at the end, if matplotlib is installed."""
    deterministic: bool = False
    """Use deterministic algorithms only, which are slower."""
    seed: int = 0
    """Seed of initial weights, data order and dropout."""

    @classmethod
    def upgraded(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return config data with the top-level `precision` and `compile` of version 0.1 as keys of `layout`."""
        data = dict(data)
        old = {str(name): data.pop(name) for name in ("precision", "compile") if name in data}
        moved = {name: value for name, value in old.items() if value not in (None, "auto")}
        given = data.get("layout")
        if moved:
            written = ", ".join(f"layout.{name}={value}" for name, value in moved.items())
            _log.warning("the config has %s at its top, as in 0.1; write %s", " and ".join(moved), written)
        if given is None or isinstance(given, Mapping):
            data["layout"] = {"precision": "auto", **(given or {}), **moved}
        return data

    @property
    def model_folder(self) -> str | None:
        """The Hugging Face folder that `model` names; None for a preset or a model config."""
        if isinstance(self.model, str) and (os.path.sep in self.model or os.path.isdir(self.model)):
            return self.model
        return None

    def __post_init__(self) -> None:
        if (self.budget_tokens is None) == (self.budget_minutes is None):
            raise ConfigError("give one of budget_tokens and budget_minutes", fix="add one of them")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value}", fix="it must be positive")
        if self.data.seq_len is not None and self.data.seq_len <= 0:
            raise ConfigError(f"data.seq_len is {self.data.seq_len}", fix="it must be positive")
        if self.optimizer.lr is not None and not 0 < self.optimizer.lr < math.inf:
            raise ConfigError(f"optimizer.lr is {self.optimizer.lr}", fix="it must be positive")
        if not 0 <= self.z_loss < math.inf:
            raise ConfigError(f"z_loss is {self.z_loss}", fix="it must be 0 or more")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}", fix="it must be from 0 to 2**63 - 1")
        if not 0 <= self.monitor_seconds < math.inf:
            raise ConfigError(f"monitor_seconds is {self.monitor_seconds}", fix="it must be 0 or more")
        if not self.out:
            raise ConfigError("out is empty", fix="name the folder of the run")
        if self.budget_minutes == math.inf:
            raise ConfigError("budget_minutes is inf", fix="the schedule needs an end: give a number")
        self._check_documents()
        steps, snapshots = self.checkpoint_steps, self.spikes.snapshot_steps
        if self.spikes.rolls_back and steps is not None and steps % snapshots:
            raise ConfigError(
                f"checkpoint_steps {steps} is not a multiple of spikes.snapshot_steps {snapshots}",
                fix=f"use {max(1, round(steps / snapshots)) * snapshots}: roll-backs need checkpoints at snapshots",
            )

    def _check_documents(self) -> None:
        layout = self.layout
        if layout.cp > 1 and layout.cp_method == "ring" and masks_documents(self.data.packing):
            raise ConfigError(
                f"layout.cp {layout.cp} with ring attention has no document masks, which data.packing "
                f"{self.data.packing} needs",
                fix="use layout.cp_method=all-to-all, or data.packing=joined",
            )
