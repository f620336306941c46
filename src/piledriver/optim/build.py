"""Build an optimizer over a model's parameters from a config."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from piledriver.core.config import from_mapping
from piledriver.core.errors import UnknownNameError
from piledriver.optim.groups import parameter_groups
from piledriver.optim.registry import ALIASES, OPTIMIZERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer trains, and its settings.

    `betas`, `eps`, `momentum` and `seed` reach the optimizers that take them; `settings` holds anything else.
    """

    kind: str = "adamw"
    """adamw; muon; lion; adamw8bit and adamw_bf16 (small moments, bf16 weights rounded stochastically); adamw_split and
    adamw_split_bf16 (the lower half of bf16 weights is a state, so updates are fp32's); or one of another package."""
    lr: float = 3e-4
    """Peak learning rate."""
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
        _own_settings(self)


_SHARED = ("betas", "eps", "momentum", "seed")
# Set by the parameter groups, from keys of the config.
_BY_GROUP = ("lr", "weight_decay")


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, *, lr_scales: Mapping[str, float] | None = None
) -> Optimizer:
    """Return the optimizer that a config names, over a model's parameters in groups.

    `lr_scales` multiplies the learning rate of single parameters by name (muP).

    >>> type(build_optimizer(nn.Linear(2, 2), OptimizerConfig(kind="lion"))).__name__
    'Lion'
    """
    groups = parameter_groups(
        model,
        lr=config.lr,
        weight_decay=config.weight_decay,
        embedding_weight_decay=config.embedding_weight_decay,
        lr_scales=lr_scales,
    )
    make = OPTIMIZERS[config.kind]
    shared = {name: getattr(config, name) for name in _SHARED if name in inspect.signature(make).parameters}
    return make(groups, config.lr, **shared, **_own_settings(config))


def _own_settings(config: OptimizerConfig) -> dict[str, Any]:
    """Return `config.settings` checked against the keyword arguments of the optimizer that no other key sets."""
    fields: list[Any] = []
    for argument in list(_signature(OPTIMIZERS[config.kind]).parameters.values())[1:]:
        if argument.name not in (*_SHARED, *_BY_GROUP) and argument.kind is not argument.VAR_KEYWORD:
            kind = Any if argument.annotation is argument.empty else argument.annotation
            optional = () if argument.default is argument.empty else (dataclasses.field(default_factory=lambda: None),)
            fields.append((argument.name, kind, *optional))
    settings_class = dataclasses.make_dataclass("Settings", fields, kw_only=True)
    settings: Any = from_mapping(settings_class, config.settings, f"optimizer.settings of {config.kind}")
    return {name: getattr(settings, name) for name in config.settings}


def _signature(make: Callable[..., Optimizer]) -> inspect.Signature:
    try:
        return inspect.signature(make, eval_str=True)
    except NameError:  # annotations that only a type checker can resolve: values are taken as they are
        plain = inspect.signature(make)
        return plain.replace(
            parameters=[one.replace(annotation=inspect.Parameter.empty) for one in plain.parameters.values()]
        )
