"""List the storages of parameters, gradients, optimizer states and other live tensors with their owners."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from piledriver.observe.torch_private import local_tensor


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage: where it lies, how large it is, and what it is."""

    address: int
    size: int
    device: int
    """-1 on the host."""
    category: str
    name: str


class Releases:
    """Notes when tensors of the host that exist already are released, which a trace of the host does not tell."""

    def __init__(self) -> None:
        self.times_ns: dict[int, int] = {}
        """Address -> time of the Unix clock."""
        self._kept: list[weakref.ref[torch.Tensor]] = []

    def watch(self, tensor: torch.Tensor, address: int) -> None:
        """Note the end of a tensor."""
        times = self.times_ns
        self._kept.append(weakref.ref(tensor, lambda _: times.setdefault(address, time.time_ns())))


def owned_storages(
    models: Mapping[str, nn.Module], optimizers: Iterable[Any] = (), releases: Releases | None = None
) -> list[Storage]:
    """Return the storages of parameters, buffers, gradients and optimizer states, each once."""
    found = _Found(releases)
    names: dict[int, str] = {}
    for root, model in models.items():
        for name, parameter in model.named_parameters():
            names[id(parameter)] = f"{root}.{name}"
            _add(found, parameter, "parameter", f"{root}.{name}")
            for attribute in ("grad", "main_grad"):
                gradient = getattr(parameter, attribute, None)
                if isinstance(gradient, torch.Tensor):
                    _add(found, gradient, "gradient", f"{root}.{name}")
        for name, buffer in model.named_buffers():
            _add(found, buffer, "buffer", f"{root}.{name}")
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                name = names.get(id(parameter), f"parameter of {type(optimizer).__name__}")
                _add(found, parameter, "parameter", name)
                if isinstance(parameter.grad, torch.Tensor):
                    _add(found, parameter.grad, "gradient", name)
        state = getattr(optimizer, "state", {})
        for parameter, values in list(state.items()) if hasattr(state, "items") else ():
            name = names.get(id(parameter), "") or f"state of {type(optimizer).__name__}"
            for key, value in _tensors(values):
                _add(found, value, "optimizer state", f"{name}:{key}")
    return list(found.values())


def other_storages(known: Iterable[Storage], releases: Releases | None = None) -> list[Storage]:
    """Return the storages of all other tensors that Python can reach: batches, caches, lists of results."""
    taken = {(one.device, one.address) for one in known}
    found = _Found(releases)
    for thing in gc.get_objects():
        try:
            if issubclass(type(thing), torch.Tensor):
                _add(found, thing, "other tensor", f"{tuple(thing.shape)} {str(thing.dtype).removeprefix('torch.')}")
        except (ReferenceError, RuntimeError, NotImplementedError):  # weak proxies, freed storages, fake tensors
            continue
    return [one for key, one in found.items() if key not in taken]


class _Found(dict[tuple[int, int], Storage]):
    def __init__(self, releases: Releases | None) -> None:
        super().__init__()
        self.releases = releases


def _add(found: _Found, tensor: torch.Tensor, category: str, name: str) -> None:
    for part in local_tensor(tensor):
        if part.device.type not in ("cpu", "cuda") or part.layout != torch.strided:
            continue
        try:
            storage = part.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a tensor without storage
            continue
        device = (part.device.index or 0) if part.device.type == "cuda" else -1
        if size and address and (device, address) not in found:
            found[device, address] = Storage(address, size, device, category, name)
            if device < 0 and found.releases is not None and category in ("gradient", "other tensor"):
                found.releases.watch(tensor, address)


def _tensors(values: Any, key: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a parameter's state, with the names of their fields."""
    if isinstance(values, torch.Tensor):
        yield key, values
    elif isinstance(values, Mapping):
        for name, value in values.items():
            yield from _tensors(value, str(name))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value, key)
    else:
        for name in ("codes", "scale", "inner", "values", "scales"):
            value = getattr(values, name, None)
            if isinstance(value, torch.Tensor):
                yield key, value
