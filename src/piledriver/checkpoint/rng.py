"""The random generators of this process as one state: Python, NumPy, torch and its devices."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_DEVICE_MODULES = ("cuda", "xpu", "mps")


def capture() -> dict[str, Any]:
    """The state of every generator that exists here.

    >>> saved = capture(); drawn = torch.rand(1), random.random(), np.random.random()
    >>> restore(saved); drawn == (torch.rand(1), random.random(), np.random.random())
    []
    True
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    for name in _DEVICE_MODULES:
        module = getattr(torch, name, None)
        if module is not None and module.is_available() and getattr(module, "is_initialized", _always)():
            # A device that was not used yet stays so: its context costs memory and forbids forking.
            # MPS has one device and no `_all`.
            state[name] = module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else module.get_rng_state()
    return state


def restore(state: Mapping[str, Any]) -> list[str]:
    """Put the generators back. Returns notes on those that this machine has not."""
    notes: list[str] = []
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    for name in _DEVICE_MODULES:
        if name not in state:
            continue
        module = getattr(torch, name, None)
        if module is None or not module.is_available():
            notes.append(f"the {name} generator was saved but there is no such device")
        elif isinstance(state[name], list):
            count = min(len(state[name]), module.device_count())
            for index in range(count):
                module.set_rng_state(state[name][index].cpu(), index)
        else:
            module.set_rng_state(state[name].cpu())
    return notes


def _always() -> bool:
    return True
