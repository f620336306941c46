"""Random numbers of torch, its devices, numpy and Python: seeded alike or per rank, saved, restored, synchronised.

Our own code draws from counter-based streams (`core.random`), which have no state. This is for the user's model
(dropout, initialisation) and datasets, which draw from the global generators.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from piledriver.core.errors import UnknownNameError
from piledriver.runtime.collectives import broadcast, broadcast_object
from piledriver.runtime.world import World

KINDS = ("torch", "cuda", "xpu", "mps", "numpy", "python", "generator")


def set_seed(seed: int, *, rank: int | None = None, deterministic: bool = False) -> int:
    """Seed everything; with `rank`, a different seed for each rank (seed + rank). Returns the seed that was used.

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
    """The state of every generator as tensors, numbers and strings: what `torch.load(weights_only=True)` can read."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "algorithm": str(numpy_state["bit_generator"]),
            "keys": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "position": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "cached": float(numpy_state["gauss"]),
        },
    }
    for kind, device in _devices():
        state[kind] = device.get_rng_state_all() if kind != "mps" else device.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put back what `capture_rng` took. Generators of devices that are not here are left alone."""
    if "torch" in state:
        torch.set_rng_state(state["torch"].cpu())
    if "python" in state:
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    if "numpy" in state:
        saved = state["numpy"]
        keys = saved["keys"].numpy().astype(np.uint32)
        np.random.set_state((saved["algorithm"], keys, saved["position"], saved["has_gauss"], saved["cached"]))
    for kind, device in _devices():
        if kind in state:
            _restore_device(kind, device, state[kind])


def synchronise_rng(world: World, kinds: Iterable[str], generator: torch.Generator | None = None) -> None:
    """Give every rank the generator state of rank 0, for the kinds named."""
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
    found: list[tuple[str, Any]] = []
    if torch.cuda.is_available():
        found.append(("cuda", torch.cuda))
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found.append(("xpu", torch.xpu))
    if torch.backends.mps.is_available():
        found.append(("mps", torch.mps))
    return found


def _restore_device(kind: str, device: Any, saved: Any) -> None:
    if kind == "mps":
        device.set_rng_state(saved)
        return
    # A run may resume on fewer devices: the states of those that are here are put back.
    for index, one in enumerate(saved[: device.device_count()]):
        device.set_rng_state(one.cpu(), index)
