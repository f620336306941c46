"""Which module goes on which device: a map from module names to devices, made by filling them in order."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from piledriver.compat.accelerate.utils.module_sizes import (
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    get_max_memory,
)
from piledriver.compat.accelerate.utils.module_tensors import find_tied_parameters

logger = logging.getLogger("accelerate.utils.modeling")

Named = list[tuple[str, Any]]


def check_device_map(model: nn.Module, device_map: dict[str, Any]) -> None:
    """Every tensor must have a device; names that are no module are warned of."""
    modules = [name for name, _ in model.named_modules()]
    tensors = [*model.state_dict(), *(name for name, _ in model.named_parameters())]
    wrong = [key for key in device_map if key not in modules and key not in tensors and key != ""]
    if wrong:
        warnings.warn(
            f"The following device_map keys do not match any submodules in the model: {wrong}",
            UserWarning,
            stacklevel=2,
        )
    if "" in device_map:
        return
    left = [name for name in model.state_dict() if not any(_inside(name, key) for key in device_map)]
    if left:
        raise ValueError(
            f"The device_map provided does not give any device for the following parameters: {', '.join(left)}"
        )


def _inside(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Parts that are all on one device, as one entry."""
    below = [key for key in device_map if module_name == "" or key.startswith(module_name + ".")]
    devices = {device_map[key] for key in below}
    if len(devices) == 1 and len(below) > 1:
        for key in below:
            del device_map[key]
        device_map[module_name] = devices.pop()
        return device_map
    depth = len(module_name.split(".")) + 1 if module_name else 1
    for child in dict.fromkeys(".".join(key.split(".")[:depth]) for key in below if key != module_name):
        clean_device_map(device_map, child)
    return device_map


def get_module_size_with_ties(
    tied_params: list[str], module_size: int, module_sizes: dict[str, int], modules_to_treat: Named
) -> tuple[int, list[str], list[Any]]:
    """A module's size together with the modules that share parameters with it, shared ones counted once."""
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


def get_balanced_memory(
    model: nn.Module,
    max_memory: dict[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    dtype: Any = None,
    special_dtypes: dict[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[Any, int]:
    """Limits that make devices share a model evenly; the last one keeps all that it has."""
    memory = get_max_memory(max_memory)
    devices = [key for key, value in memory.items() if key not in ("cpu", "disk") and value > 0]
    if not devices:
        return memory
    if len(devices) == 1:
        low_zero = False
        if max_memory is None:
            memory[devices[0]] = int(memory[devices[0]] * 0.9)
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    each = sizes[""] // (len(devices) - 1 if low_zero else len(devices))
    each += int(1.25 * max(_largest_unsplit(model, sizes, _as_list(no_split_module_classes)), _mean_leaf(sizes)))
    for device in devices[:-1]:
        if not (low_zero and device == devices[0]):
            memory[device] = min(memory[device], each)
    if low_zero:
        others = sum(memory[device] for device in devices[1:])
        memory[devices[0]] = min(max(0, sizes[""] - others), memory[devices[0]])
    return memory


def _largest_unsplit(model: nn.Module, sizes: dict[str, int], classes: list[str]) -> int:
    return max(
        (sizes[n] for n, m in model.named_modules() if n and type(m).__name__ in classes and n in sizes), default=0
    )


def _mean_leaf(sizes: dict[str, int]) -> int:
    """The mean size of modules that hold tensors and no modules."""
    modules = {name for name in sizes if any(other.startswith(name + ".") for other in sizes)} - {""}
    leaves = [name for name in modules if not any(other.startswith(name + ".") for other in modules)]
    return int(sum(sizes[name] for name in leaves) / max(len(leaves), 1))


def _as_list(classes: Any) -> list[str]:
    if classes is None:
        return []
    return [classes] if isinstance(classes, str) else list(classes)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: dict[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    dtype: Any = None,
    special_dtypes: dict[str, Any] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Any]:
    """Fill devices in order, splitting modules where they do not fit; what is left goes to the CPU, then to disk."""
    packer = _Packer(model, get_max_memory(max_memory), _as_list(no_split_module_classes), dtype, special_dtypes or {})
    packer.fallback = fallback_allocation
    device_map = packer.fill()
    if clean_result:
        device_map = clean_device_map(device_map)
    if not offload_buffers:
        packer.warn_of_buffers()
    if packer.too_small:
        devices = ", ".join(f"{device}: {size} bytes required" for device, size in packer.too_small.items())
        logger.info(
            "Based on the current allocation process, no modules could be assigned to the following devices due to "
            "insufficient memory: %s",
            devices,
        )
    return device_map


class _Packer:
    """The state of filling devices with modules."""

    def __init__(
        self, model: nn.Module, memory: dict[Any, int], no_split: list[str], dtype: Any, special: dict[str, Any]
    ) -> None:
        self.memory = memory
        self.no_split = no_split
        self.dtype = dtype
        self.special = special
        self.sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special)
        self.tied = find_tied_parameters(model)
        self.devices = [*memory, *([] if "disk" in memory else ["disk"])]
        self.accelerators = [device for device in self.devices if device not in ("cpu", "disk")]
        # The first device also runs what is kept elsewhere: room for the largest layer is left on it.
        self.keeps_room = {*self.accelerators[:1], "cpu"}
        self.waiting: Named = _parts(model, "", buffers=True)
        self.used: dict[Any, int] = dict.fromkeys(self.devices, 0)
        self.buffers: dict[Any, int] = {}
        self.too_small: dict[Any, int] = {}
        self.device_map: dict[str, Any] = {}
        self.fallback = False
        self.at = 0
        self.layer_size = 0
        self.layer_names: list[str] = []
        self._measure_layers(self.waiting)

    def fill(self) -> dict[str, Any]:
        """Until nothing waits."""
        while self.waiting:
            name, module = self.waiting.pop(0)
            self.layer_names = [n for n in self.layer_names if not _inside(n, name)]
            if not self.layer_names:
                self._measure_layers([(n, m) for n, m in self.waiting if isinstance(m, nn.Module)])
            self._treat(name, module)
        return self.device_map

    def _treat(self, name: str, module: Any) -> None:
        device = self.devices[self.at]
        room, reserved = self._room(device)
        ties = self._ties_of(name)
        size = self.sizes.get(name, 0)
        together, tied_names, tied_modules = get_module_size_with_ties(ties, size, self.sizes, self.waiting)
        if room is None or self.used[device] + together <= room:
            self._assign(device, name, module, together, tied_names)
            return
        alone_fits = self.used[device] + size <= room
        if ties and alone_fits and self._split_a_tied_one(name, module, tied_names, tied_modules):
            return
        if not alone_fits and self._can_split(module):
            self.waiting = _parts(module, name) + self.waiting
            self._measure_layers(self.waiting)
            return
        if (
            self.used[device] == 0
            and self.fallback
            and device != "disk"
            and self._fall_back(device, name, module, together)
        ):
            return
        if self.used[device] == 0:
            self.too_small[device] = together + reserved
        # What was kept free for the largest layer will be in use while one runs.
        self.used[device] += reserved
        self.at += 1
        self.waiting.insert(0, (name, module))

    def _room(self, device: Any) -> tuple[int | None, int]:
        if device == "disk":
            return None, 0
        reserved = self.layer_size if device in self.keeps_room else 0
        return self.memory[device] - reserved, reserved

    def _assign(self, device: Any, name: str, module: Any, size: int, tied_names: Iterable[str]) -> None:
        self.used[device] += size
        self.device_map[name] = device
        assigned = [(name, module)]
        for tied_name in dict.fromkeys(tied_names):
            found = next((pair for pair in self.waiting if pair[0] == tied_name), None)
            if found is not None:
                self.waiting.remove(found)
                self.device_map[tied_name] = device
                assigned.append(found)
        for _, one in assigned:
            if isinstance(one, nn.Module):
                size = compute_module_total_buffer_size(one, dtype=self.dtype, special_dtypes=self.special)
                self.buffers[device] = self.buffers.get(device, 0) + size

    def _ties_of(self, name: str) -> list[str]:
        """Parameters outside a module that share one inside."""
        found: list[str] = []
        for group in self.tied:
            inside = [parameter for parameter in group if _inside(parameter, name)]
            if inside and len(inside) < len(group):
                found += [parameter for parameter in group if parameter not in inside]
        return found

    def _can_split(self, module: Any) -> bool:
        return (
            isinstance(module, nn.Module)
            and any(True for _ in module.children())
            and type(module).__name__ not in self.no_split
        )

    def _split_a_tied_one(self, name: str, module: Any, tied_names: list[str], tied_modules: list[Any]) -> bool:
        for tied_name, tied_module in zip(tied_names, tied_modules, strict=True):
            if self._can_split(tied_module):
                at = next(i for i, (n, _) in enumerate(self.waiting) if n == tied_name)
                self.waiting[at : at + 1] = _parts(tied_module, tied_name)
                self.waiting.insert(0, (name, module))
                self._measure_layers(self.waiting)
                return True
        return False

    def _fall_back(self, device: Any, name: str, module: Any, together: int) -> bool:
        """Put something smaller on a device that would stay empty."""
        limit = self.memory[device] - max(self.layer_size, together)
        found = self._first_that_fits(limit)
        if found is None:
            return False
        self._uncover(found)
        at = next(i for i, (n, _) in enumerate(self.waiting) if n == found)
        chosen = self.waiting.pop(at)
        self.waiting = [chosen, (name, module), *self.waiting]
        return True

    def _first_that_fits(self, limit: int) -> str | None:
        search = list(self.waiting)
        while search:
            name, module = search.pop(0)
            together, _, _ = get_module_size_with_ties(self._ties_of(name), self.sizes.get(name, 0), self.sizes, search)
            if together <= limit:
                return name
            if self._can_split(module):
                search = _parts(module, name) + search
        return None

    def _uncover(self, name: str) -> None:
        """Split the waiting modules that hold a part until the part itself waits."""
        while not any(n == name for n, _ in self.waiting):
            at = next(i for i, (n, _) in enumerate(self.waiting) if name.startswith(n + "."))
            parent, module = self.waiting[at]
            self.waiting[at : at + 1] = _parts(module, parent)

    def _measure_layers(self, modules: Named) -> None:
        self.layer_size, self.layer_names = get_max_layer_size(modules, self.sizes, self.no_split)

    def warn_of_buffers(self) -> None:
        """Buffers of modules that are kept away are brought to a device all at once: say so if none has room."""
        away = self.buffers.get("cpu", 0) + self.buffers.get("disk", 0)
        if not away or not self.accelerators:
            return
        if not any(self.memory[device] >= away + self.used[device] for device in self.accelerators):
            warnings.warn(
                f"Current model requires {away} bytes of buffer for offloaded layers, which seems does not fit any "
                "GPU's remaining memory. If you are experiencing a OOM later, please consider using "
                "offload_buffers=True.",
                stacklevel=3,
            )


def _parts(module: nn.Module, name: str, buffers: bool = False) -> Named:
    own: Named = [*module.named_parameters(recurse=False), *module.named_children()]
    own += list(module.named_buffers(recurse=False)) if buffers else []
    return [(f"{name}.{part}" if name else part, thing) for part, thing in own]


def check_tied_parameters_on_same_device(tied_params: list[list[str]], device_map: dict[str, Any]) -> None:
    """Warn where parameters that are one would be on several devices."""
    for group in tied_params:
        devices = {name: next((d for key, d in device_map.items() if _inside(name, key)), None) for name in group}
        if len(set(devices.values())) > 1:
            logger.warning("Tied parameters are on different devices: %s. Please modify your device map.", devices)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a transformers config says that embeddings are tied."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "tie_word_embeddings", False))
