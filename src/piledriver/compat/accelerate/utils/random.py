"""`accelerate.utils.random`: seeds and their synchronisation."""

from __future__ import annotations

from typing import Any

import torch

from piledriver.compat.accelerate.state import AcceleratorState, PartialState
from piledriver.runtime import seeds


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed torch, its devices, numpy and Python; with `device_specific` differently on each process."""
    rank = AcceleratorState().process_index if device_specific else None
    seeds.set_seed(seed, rank=rank, deterministic=deterministic)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Set one generator to the state of rank 0."""
    seeds.synchronise_rng(PartialState().world, [rng_type] if rng_type is not None else [], generator)


def synchronize_rng_states(rng_types: list[Any], generator: torch.Generator | None = None) -> None:
    """Set generators to their states on rank 0."""
    seeds.synchronise_rng(PartialState().world, rng_types, generator)
