"""Settings of optimizer and schedule, checked before torch is imported, and the optimizer that they describe."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from piledriver.core.config import from_mapping
from piledriver.core.errors import ConfigError, UnknownNameError
from piledriver.optim.registry import ALIASES, OPTIMIZERS

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

SHARED = ("betas", "eps", "momentum", "seed")
"""Keys that reach every optimizer with an argument of that name."""
# Set by the parameter groups, from keys of the config.
_BY_GROUP = ("lr", "weight_decay")
_DEFAULT_LR = 3e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer trains, and its settings.

    `betas`, `eps`, `momentum` and `seed` reach the optimizers that take them; `settings` holds anything else.
    """

    kind: str = dataclasses.field(default="adamw", metadata={"choices": lambda: list(OPTIMIZERS)})
    """adamw; muon; lion; adamw8bit and adamw_bf16 (small moments, bf16 weights rounded stochastically); adamw_split and
    adamw_split_bf16 (the lower half of bf16 weights is a state, so updates are fp32's); or one of another package."""
    lr: float | None = None
    """Peak learning rate; null: `piledriver train` takes the preset's, or one by size; elsewhere 3e-4."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment (Lion: of update and momentum)."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; vectors never decay."""
    embedding_weight_decay: float | None = None
    """Decay of embeddings; null for that of matrices."""
    momentum: float = 0.95
    """Momentum of Muon."""
    seed: int = 0
    """Seed of stochastic rounding."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further keyword arguments of the optimizer, e.g. {nesterov: false} for muon."""

    def __post_init__(self) -> None:
        if self.kind in ALIASES:
            name = ALIASES[self.kind]
            warnings.warn(f"optimizer.kind {self.kind!r} is now called {name!r}", FutureWarning, stacklevel=2)
            object.__setattr__(self, "kind", name)
        if self.kind not in OPTIMIZERS:
            raise UnknownNameError("optimizer", self.kind, OPTIMIZERS)
        if self.settings:
            own_settings(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate moves. `warmup`, `total` and `decay` are counted in `unit`."""

    kind: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = "cosine"
    """After warmup: half a cosine, a straight line, flat with a fall at the end (warmup-stable-decay), 1/sqrt, flat."""
    unit: Literal["steps", "tokens"] = "steps"
    """What the numbers below count."""
    warmup: int = 0
    """The learning rate rises from zero in a straight line over this much."""
    total: int = 0
    """Where the schedule ends (not needed by inverse_sqrt and constant)."""
    decay: int = 0
    """wsd only: the length of the fall at the end; 0 for a tenth of the total."""
    decay_shape: Literal["linear", "one_minus_sqrt"] = "linear"
    """wsd only: how it falls (one_minus_sqrt: Hägele et al., 2024)."""
    floor: float = 0.0
    """What is left at the end, as a part of the peak."""

    def __post_init__(self) -> None:
        if self.kind in ("cosine", "linear", "wsd") and self.total <= self.warmup:
            raise ConfigError(
                f"a {self.kind} schedule of {self.total} {self.unit} ends within its warmup of {self.warmup}",
                fix="set total to the length of the run",
            )
        if self.warmup < 0 or not 0.0 <= self.floor <= 1.0:
            raise ConfigError(
                f"warmup is {self.warmup} and floor {self.floor}", fix="use warmup >= 0 and 0 <= floor <= 1"
            )
        if self.kind == "wsd" and self.warmup + self.decay_length > self.total:
            raise ConfigError(
                f"warmup {self.warmup} and decay {self.decay_length} do not fit in {self.total} {self.unit}",
                fix="shorten one of them",
            )

    @property
    def decay_length(self) -> int:
        """How long the fall of wsd takes."""
        return self.decay or max(1, self.total // 10)


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, *, lr_scales: Mapping[str, float] | None = None
) -> Optimizer:
    """Return the optimizer that a config names, over a model's parameters in groups.

    `lr_scales` multiplies the learning rate of single parameters by name (muP).

    >>> from torch import nn
    >>> type(build_optimizer(nn.Linear(2, 2), OptimizerConfig(kind="lion"))).__name__
    'Lion'
    """
    from piledriver.optim.groups import parameter_groups

    lr = _DEFAULT_LR if config.lr is None else config.lr
    groups = parameter_groups(
        model,
        lr=lr,
        weight_decay=config.weight_decay,
        embedding_weight_decay=config.embedding_weight_decay,
        lr_scales=lr_scales,
    )
    make = OPTIMIZERS[config.kind]
    shared = {name: getattr(config, name) for name in SHARED if name in inspect.signature(make).parameters}
    return make(groups, lr, **shared, **own_settings(config))


def own_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return `config.settings` checked against the keyword arguments of the optimizer that no other key sets."""
    fields: list[Any] = []
    for argument in list(_signature(OPTIMIZERS[config.kind]).parameters.values())[1:]:
        if argument.name not in (*SHARED, *_BY_GROUP) and argument.kind is not argument.VAR_KEYWORD:
            kind = Any if argument.annotation is argument.empty else argument.annotation
            optional = () if argument.default is argument.empty else (dataclasses.field(default_factory=lambda: None),)
            fields.append((argument.name, kind, *optional))
    settings_class = dataclasses.make_dataclass("Settings", fields, kw_only=True)
    settings: Any = from_mapping(settings_class, config.settings, f"optimizer.settings of {config.kind}")
    return {name: getattr(settings, name) for name in config.settings}


def _signature(make: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(make, eval_str=True)
    except NameError:  # annotations that only a type checker can resolve: values are taken as they are
        plain = inspect.signature(make)
        return plain.replace(
            parameters=[one.replace(annotation=inspect.Parameter.empty) for one in plain.parameters.values()]
        )
