"""From a config to an optimizer over a model's parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from piledriver.optim.adamw import make_adamw
from piledriver.optim.compact_adamw import CompactAdamW, States
from piledriver.optim.groups import parameter_groups
from piledriver.optim.lion import Lion
from piledriver.optim.muon import Muon
from piledriver.optim.split_master_adamw import MasterAdamW, Moments


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer, and how fast."""

    kind: Literal["adamw", "muon", "lion", "adamw8bit", "adamw_bf16", "adamw_master", "adamw_master_bf16"] = "adamw"
    """adamw8bit keeps its states in 8 bits, adamw_bf16 in bf16; both round bf16 weights stochastically. adamw_master
    keeps the other half of bf16 weights, so that updates are exactly fp32's; its moments are fp32, or bf16."""
    lr: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment (Lion: of update and momentum)."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; vectors never decay."""
    embedding_weight_decay: float | None = None
    """Decay of embeddings; null for the same as matrices."""
    momentum: float = 0.95
    """Muon only."""
    seed: int = 0
    """Of the stochastic rounding."""


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, *, lr_scales: Mapping[str, float] | None = None
) -> Optimizer:
    """The optimizer that the config asks for, with its parameter groups.

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
    if config.kind == "adamw":
        return make_adamw(groups, config.lr, betas=config.betas, eps=config.eps)
    if config.kind == "lion":
        return Lion(groups, config.lr, betas=config.betas)
    if config.kind == "muon":
        return Muon(groups, config.lr, momentum=config.momentum, betas=config.betas, eps=config.eps)
    if config.kind in ("adamw_master", "adamw_master_bf16"):
        moments: Moments = "bf16" if config.kind == "adamw_master_bf16" else "fp32"
        return MasterAdamW(groups, config.lr, betas=config.betas, eps=config.eps, moments=moments, seed=config.seed)
    states: States = "int8" if config.kind == "adamw8bit" else "bf16"
    return CompactAdamW(groups, config.lr, betas=config.betas, eps=config.eps, states=states, seed=config.seed)
