"""Greedy allocation of modules to devices: fill devices in order, split a module where it does not fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from piledriver.plan.placement.sizes import compute_module_sizes
from piledriver.serve.placement.maps.sizes import compute_module_total_buffer_size, get_max_layer_size
from piledriver.serve.placement.tensors import find_tied_parameters

NamedModules = list[tuple[str, Any]]


def is_inside(name: str, module: str) -> bool:
    """Return whether a dotted name is a module's or lies below it."""
    return name == module or name.startswith(module + ".")


def get_module_size_with_ties(
    tied_params: list[str], module_size: int, module_sizes: dict[str, int], modules_to_treat: NamedModules
) -> tuple[int, list[str], list[Any]]:
    """Return the size of a module with the modules tied to it, tied weights counted once; their names; the modules."""
    names: list[str] = []
    modules: list[Any] = []
    total = module_size
    for parameter in tied_params:
        owner = next(((n, m) for n, m in modules_to_treat if parameter.startswith(n + ".")), None)
        if owner is None:
            continue
        total -= module_sizes.get(parameter, 0)
        if owner[0] not in names:
            total += module_sizes.get(owner[0], 0)
        names.append(owner[0])
        modules.append(owner[1])
    return total, names, modules


class DeviceAllocator:
    """The state of filling devices with modules; `fill` returns the device map.

    The first accelerator and the CPU keep room for the largest layer, which they load to run offloaded ones.
    """

    def __init__(
        self,
        model: nn.Module,
        memory: dict[Any, int],
        no_split: list[str],
        dtype: Any,
        special_dtypes: dict[str, Any],
        fallback: bool,
    ) -> None:
        self.memory = memory
        self.no_split = no_split
        self.dtype = dtype
        self.special_dtypes = special_dtypes
        self.fallback = fallback
        self.sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
        self.tied = find_tied_parameters(model)
        self.devices = [*memory, *([] if "disk" in memory else ["disk"])]
        self.accelerators = [device for device in self.devices if device not in ("cpu", "disk")]
        self.reserving = {*self.accelerators[:1], "cpu"}
        self.queue: NamedModules = _children(model, "", buffers=True)
        self.used: dict[Any, int] = dict.fromkeys(self.devices, 0)
        self.buffers: dict[Any, int] = {}
        self.too_small: dict[Any, int] = {}
        self.device_map: dict[str, Any] = {}
        self.device_index = 0
        self.layer_size = 0
        self.layer_names: list[str] = []
        self._measure_layers(self.queue)

    def fill(self) -> dict[str, Any]:
        """Allocate every module; return module names with their devices."""
        while self.queue:
            name, module = self.queue.pop(0)
            self.layer_names = [n for n in self.layer_names if not is_inside(n, name)]
            if not self.layer_names:
                self._measure_layers([(n, m) for n, m in self.queue if isinstance(m, nn.Module)])
            self._allocate(name, module)
        return self.device_map

    def warn_of_buffers(self) -> None:
        """Warn if the buffers of offloaded modules, which are loaded together, fit on no accelerator."""
        offloaded = self.buffers.get("cpu", 0) + self.buffers.get("disk", 0)
        if not offloaded or not self.accelerators:
            return
        if not any(self.memory[device] >= offloaded + self.used[device] for device in self.accelerators):
            warnings.warn(
                f"Current model requires {offloaded} bytes of buffer for offloaded layers, which seems does not fit "
                "any GPU's remaining memory. If you are experiencing a OOM later, please consider using "
                "offload_buffers=True.",
                stacklevel=3,
            )

    def _allocate(self, name: str, module: Any) -> None:
        """Assign one module, or put it back into the queue: in pieces, behind a smaller one, or for the next device."""
        device = self.devices[self.device_index]
        room, reserved = self._room(device)
        ties = self._ties_of(name)
        size = self.sizes.get(name, 0)
        with_ties, tied_names, tied_modules = get_module_size_with_ties(ties, size, self.sizes, self.queue)
        if room is None or self.used[device] + with_ties <= room:
            self._assign(device, name, module, with_ties, tied_names)
            return
        fits_without_ties = self.used[device] + size <= room
        if ties and fits_without_ties and self._split_tied(name, module, tied_names, tied_modules):
            return
        if not fits_without_ties and self._can_split(module):
            self.queue = _children(module, name) + self.queue
            self._measure_layers(self.queue)
            return
        empty = self.used[device] == 0
        if empty and self.fallback and device != "disk" and self._fall_back(device, name, module, with_ties):
            return
        if empty:
            self.too_small[device] = with_ties + reserved
        self.used[device] += reserved
        self.device_index += 1
        self.queue.insert(0, (name, module))

    def _room(self, device: Any) -> tuple[int | None, int]:
        if device == "disk":
            return None, 0
        reserved = self.layer_size if device in self.reserving else 0
        return self.memory[device] - reserved, reserved

    def _assign(self, device: Any, name: str, module: Any, size: int, tied_names: Iterable[str]) -> None:
        self.used[device] += size
        self.device_map[name] = device
        assigned = [(name, module)]
        for tied_name in dict.fromkeys(tied_names):
            found = next((pair for pair in self.queue if pair[0] == tied_name), None)
            if found is not None:
                self.queue.remove(found)
                self.device_map[tied_name] = device
                assigned.append(found)
        for _, one in assigned:
            if isinstance(one, nn.Module):
                size = compute_module_total_buffer_size(one, dtype=self.dtype, special_dtypes=self.special_dtypes)
                self.buffers[device] = self.buffers.get(device, 0) + size

    def _ties_of(self, name: str) -> list[str]:
        """Return the parameters outside a module that are tied to one inside."""
        found: list[str] = []
        for group in self.tied:
            inside = [parameter for parameter in group if is_inside(parameter, name)]
            if inside and len(inside) < len(group):
                found += [parameter for parameter in group if parameter not in inside]
        return found

    def _can_split(self, module: Any) -> bool:
        return (
            isinstance(module, nn.Module)
            and any(True for _ in module.children())
            and type(module).__name__ not in self.no_split
        )

    def _split_tied(self, name: str, module: Any, tied_names: list[str], tied_modules: list[Any]) -> bool:
        """Split the first tied module that can be split; return whether there was one."""
        for tied_name, tied_module in zip(tied_names, tied_modules, strict=True):
            if self._can_split(tied_module):
                at = next(i for i, (n, _) in enumerate(self.queue) if n == tied_name)
                self.queue[at : at + 1] = _children(tied_module, tied_name)
                self.queue.insert(0, (name, module))
                self._measure_layers(self.queue)
                return True
        return False

    def _fall_back(self, device: Any, name: str, module: Any, with_ties: int) -> bool:
        """Move a smaller module to the front for a device that would stay empty; return whether one fits."""
        found = self._first_that_fits(self.memory[device] - max(self.layer_size, with_ties))
        if found is None:
            return False
        self._split_down_to(found)
        at = next(i for i, (n, _) in enumerate(self.queue) if n == found)
        chosen = self.queue.pop(at)
        self.queue = [chosen, (name, module), *self.queue]
        return True

    def _first_that_fits(self, limit: int) -> str | None:
        search = list(self.queue)
        while search:
            name, module = search.pop(0)
            size, _, _ = get_module_size_with_ties(self._ties_of(name), self.sizes.get(name, 0), self.sizes, search)
            if size <= limit:
                return name
            if self._can_split(module):
                search = _children(module, name) + search
        return None

    def _split_down_to(self, name: str) -> None:
        """Split the modules in the queue that hold a module until it is in the queue itself."""
        while not any(n == name for n, _ in self.queue):
            at = next(i for i, (n, _) in enumerate(self.queue) if name.startswith(n + "."))
            parent, module = self.queue[at]
            self.queue[at : at + 1] = _children(module, parent)

    def _measure_layers(self, modules: NamedModules) -> None:
        self.layer_size, self.layer_names = get_max_layer_size(modules, self.sizes, self.no_split)


def _children(module: nn.Module, name: str, buffers: bool = False) -> NamedModules:
    """Return a module's own parameters and its children, with their full names; the root's buffers too."""
    own: NamedModules = [*module.named_parameters(recurse=False), *module.named_children()]
    own += list(module.named_buffers(recurse=False)) if buffers else []
    return [(f"{name}.{child}" if name else child, thing) for child, thing in own]
