"""Build an optimizer over a model's parameters from a config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from piledriver.optim.config import SHARED, OptimizerConfig, own_settings
from piledriver.optim.groups import parameter_groups
from piledriver.optim.registry import OPTIMIZERS


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
    shared = {name: getattr(config, name) for name in SHARED if name in inspect.signature(make).parameters}
    return make(groups, config.lr, **shared, **own_settings(config))
