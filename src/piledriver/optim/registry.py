"""Optimizers by name. Other packages add theirs through the entry-point group `piledriver.optimizer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from piledriver.core.registry import Registry

if TYPE_CHECKING:
    from torch.optim import Optimizer

_HERE = "piledriver.optim"

OPTIMIZERS: Registry[Callable[..., Optimizer]] = Registry(
    "optimizer",
    {
        "adamw": f"{_HERE}.adamw.fused:make_adamw",
        "muon": f"{_HERE}.muon:Muon",
        "lion": f"{_HERE}.lion:Lion",
        "adamw8bit": f"{_HERE}.adamw.compact:adamw8bit",
        "adamw_bf16": f"{_HERE}.adamw.compact:adamw_bf16",
        "adamw_split": f"{_HERE}.adamw.split_master:SplitMasterAdamW",
        "adamw_split_bf16": f"{_HERE}.adamw.split_master:adamw_split_bf16",
    },
)
"""Classes or functions `(params, lr, **settings)`. Their keyword arguments are the settings that a config may give."""

ALIASES = {"adamw_master": "adamw_split", "adamw_master_bf16": "adamw_split_bf16"}
"""Names of version 0.1 and what they are called now."""
