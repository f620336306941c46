"""What to train, as data: a model, tokens, a global batch and a budget; the rest has defaults, derived and shown."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from piledriver.core.errors import ConfigError
from piledriver.data.stream.token_stream import Packing
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
    """Which tokens, in which order."""

    corpus: str | None = None
    """Text: a shard, a folder of them, or what `piledriver corpus build` made; tokenised into the run's folder."""
    tokenizer: str | None = None
    """With a corpus: the tokenizer; one of the model's vocabulary is learned from the corpus where not given."""
    tokens: str | None = None
    """Instead of a corpus: the folder of token shards that `piledriver tokenize` made."""
    seq_len: int | None = None
    """Tokens in a window; the model's longest where not given."""
    packing: Packing = "packed"
    """How documents share windows: see StreamConfig."""
    mixture: dict[str, float] | None = None
    """Share of each source; as much as there is where not given."""
    exclude_sources: tuple[str, ...] = ()
    """Sources whose documents are skipped."""
    exclude_licences: tuple[str, ...] = ()
    """Licences whose documents are skipped."""

    def __post_init__(self) -> None:
        if (self.corpus is None) == (self.tokens is None):
            raise ConfigError(
                "give one of data.corpus and data.tokens", fix="text is a corpus, token shards are tokens"
            )
        if self.tokenizer is not None and self.corpus is None:
            raise ConfigError("data.tokenizer goes with data.corpus", fix="token shards have theirs: leave it out")


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """What counts as a loss that went wrong, and what is done about it."""

    factor: float = 2.0
    """A loss this many times the running mean's distance above it is a spike; not-a-number always is."""
    action: Literal["log", "skip", "rollback", "stop"] = "skip"
    """Note it; leave the step out; go back to the last snapshot and leave out every batch since; or end the run."""
    warmup_steps: int = 50
    """Losses fall fast at first: no spikes are looked for before this step."""
    snapshot_steps: int = 20
    """With rollback: how often weights and optimizer are copied to host memory, and so what is lost at most."""
    max_rollbacks: int = 5
    """With rollback: so many from one place without a step forward end the run; other batches do not help it."""

    def __post_init__(self) -> None:
        for name in ("factor", "snapshot_steps", "max_rollbacks"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"spikes.{name} is {getattr(self, name)}", fix="it must be positive")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    model: str | ModelConfig
    """A preset by name, or a whole shape."""
    data: DataConfig
    batch_tokens: int
    """Tokens in one optimizer step, over all processes."""
    budget_tokens: int | None = None
    """Stop after so many tokens."""
    budget_minutes: float | None = None
    """Stop after so much time; the schedule is laid out for what the first steps show to be possible."""
    out: str = "run"
    """The run's folder; if it holds checkpoints the run goes on from the last one."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig | None = None
    """Warm-up of 2% and a cosine to a tenth where not given."""
    clip: float = 1.0
    """Largest gradient norm."""
    z_loss: float = 0.0
    """Weight of the squared log-partition function."""
    layout: Layout = field(default_factory=lambda: Layout(precision="auto"))
    """How the model is placed on ranks and computed, for example {zero: 3, tp: 2, precision: bf16, compile: blocks}. By
    default a replica per rank; precision bf16 on a GPU, fp32 on a CPU; compiled on a GPU."""
    micro_batch_tokens: int | None = None
    """Tokens that one process takes at once; derived where not given."""
    checkpoint_minutes: float = 10.0
    """How often the run is saved."""
    checkpoint_steps: int | None = None
    """Save every so many steps instead."""
    keep_checkpoints: int = 2
    """Number of latest checkpoints kept on disk."""
    validate_steps: int | None = None
    """How often the validation figures are computed; ten times in the run where not given."""
    log_steps: int = 1
    """Steps between lines of metrics.jsonl."""
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    trackers: tuple[str, ...] | None = None
    """Where metrics go besides the run folder's metrics.jsonl (wandb, ...); TensorBoard where it is installed if not
    given, [] for nowhere."""
    plots: bool = True
    """Draw plots/*.png at the end, where matplotlib is installed."""
    deterministic: bool = False
    """Only algorithms that give the same bits every time; slower."""
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

    def __post_init__(self) -> None:
        if (self.budget_tokens is None) == (self.budget_minutes is None):
            raise ConfigError("give one of budget_tokens and budget_minutes", fix="add the one that you know")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value}", fix="it must be positive")
        if self.data.seq_len is not None and self.data.seq_len <= 0:
            raise ConfigError(f"data.seq_len is {self.data.seq_len}", fix="it must be positive")
        if not 0 < self.optimizer.lr < math.inf:
            raise ConfigError(f"optimizer.lr is {self.optimizer.lr}", fix="it must be positive")
        if not 0 <= self.z_loss < math.inf:
            raise ConfigError(f"z_loss is {self.z_loss}", fix="it must be 0 or more")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}", fix="it must be from 0 to 2**63 - 1")
        if not self.out:
            raise ConfigError("out is empty", fix="name the folder of the run")
        if self.budget_minutes == math.inf:
            raise ConfigError("budget_minutes is inf", fix="the schedule needs an end: give a number")
        self._check_documents()
        steps, snapshots = self.checkpoint_steps, self.spikes.snapshot_steps
        if self.spikes.action == "rollback" and steps is not None and steps % snapshots:
            raise ConfigError(
                f"checkpoint_steps {steps} is not a multiple of spikes.snapshot_steps {snapshots}",
                fix="make it one: a run that resumes must stand where it could have gone back to",
            )

    def _check_documents(self) -> None:
        layout = self.layout
        if layout.cp > 1 and layout.cp_method == "ring" and self.data.packing != "joined":
            raise ConfigError(
                f"layout.cp {layout.cp} passes keys round, which knows no documents, and data.packing is "
                f"{self.data.packing}",
                fix="use layout.cp_method=all-to-all, or data.packing=joined",
            )
