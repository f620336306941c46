"""Random generators of torch, its devices, numpy and Python: seed, save, restore, synchronise over ranks.

These are the global generators that a user's model and datasets draw from. Our own code draws from counter-based
streams (`core.random`), which have no state.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from piledriver.core.errors import UnknownNameError
from piledriver.runtime.collectives.operations import broadcast, broadcast_object
from piledriver.runtime.world import World

_DEVICES = ("cuda", "xpu", "mps")
KINDS = ("torch", *_DEVICES, "numpy", "python", "generator")


def set_seed(seed: int, *, rank: int | None = None, deterministic: bool = False) -> int:
    """Seed every generator with `seed`, or with seed + rank if `rank` is given; return the seed that was used.

    >>> set_seed(1); a = torch.rand(1).item(); set_seed(1); a == torch.rand(1).item()
    1
    1
    True
    """
    if rank is not None:
        seed += rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Seeds every device as well, also one that is initialised later.
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
    return seed


def capture_rng() -> dict[str, Any]:
    """Return the state of every generator in this process, in each library's format."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    for kind, device in _devices():
        # Do not initialise an unused device: its context takes memory and prevents forking.
        if getattr(device, "is_initialized", lambda: True)():
            # MPS has one device and no `_all`.
            state[kind] = device.get_rng_state_all() if hasattr(device, "get_rng_state_all") else device.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any]) -> list[str]:
    """Restore generator states of `capture_rng`; return a message for each that this machine has no device for.

    >>> saved = capture_rng(); drawn = torch.rand(1), random.random(), np.random.random()
    >>> restore_rng(saved); drawn == (torch.rand(1), random.random(), np.random.random())
    []
    True
    """
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "torch" in state:
        torch.set_rng_state(state["torch"].cpu())
    here = dict(_devices())
    missing = [kind for kind in _DEVICES if kind in state and kind not in here]
    for kind, device in here.items():
        if kind in state:
            _restore_device(device, state[kind])
    return [f"the {kind} generator was saved, but this machine has no {kind} device" for kind in missing]


def synchronise_rng(world: World, kinds: Iterable[str], generator: torch.Generator | None = None) -> None:
    """Broadcast the generator states of rank 0 to every rank, for the given kinds."""
    for kind in kinds:
        name = str(getattr(kind, "value", kind))
        if name not in (*KINDS, "xla", "npu", "hpu"):
            raise UnknownNameError("random generator", name, KINDS)
        if world.is_distributed:
            _synchronise_one(world, name, generator)


def _synchronise_one(world: World, kind: str, generator: torch.Generator | None) -> None:
    if kind == "torch":
        torch.set_rng_state(_shared(world, torch.get_rng_state()))
    elif kind == "generator":
        if generator is not None:
            generator.set_state(_shared(world, generator.get_state()))
    elif kind in ("numpy", "python"):
        restore_rng({kind: broadcast_object(world, capture_rng()[kind])})
    else:
        for name, device in _devices():
            if name == kind:
                device.set_rng_state(_shared(world, device.get_rng_state()))


def _shared(world: World, state: torch.Tensor) -> torch.Tensor:
    shared: torch.Tensor = broadcast(world.with_debug(False), state)
    return shared


def _devices() -> list[tuple[str, Any]]:
    modules = ((kind, getattr(torch, kind, None)) for kind in _DEVICES)
    return [(kind, module) for kind, module in modules if module is not None and module.is_available()]


def _restore_device(device: Any, saved: Any) -> None:
    if not isinstance(saved, list):
        device.set_rng_state(saved.cpu())
        return
    # A run may resume on fewer devices.
    for index, one in enumerate(saved[: device.device_count()]):
        device.set_rng_state(one.cpu(), index)
