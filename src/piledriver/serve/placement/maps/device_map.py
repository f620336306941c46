"""Device maps: module names to devices. Infer one, balance it, check it."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import nn

from piledriver.plan.errors import PlanError
from piledriver.plan.placement.by_time import place_by_time
from piledriver.plan.placement.sizes import compute_module_sizes
from piledriver.serve.placement.errors import PlacementError
from piledriver.serve.placement.maps.allocation import DeviceAllocator, is_inside
from piledriver.serve.placement.maps.sizes import get_max_memory

_log = logging.getLogger(__name__)


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
    *,
    batch: int | None = None,
    length: int | None = None,
) -> dict[str, Any]:
    """Return a map that fills accelerators in order, then the CPU, then disk.

    With `batch` and `length`, return the fastest map that leaves room for the activations and the key-value cache of so
    many sequences of so many tokens (`plan/placement/by_time.py`); the other settings of order do not apply.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    >>> infer_auto_device_map(model, {0: 700, "cpu": 1000})
    {'0': 0, '1': 'cpu', '2': 'cpu'}
    """
    classes = _as_list(no_split_module_classes)
    if batch is not None and length is not None:
        wanted = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
        memory = get_max_memory(max_memory)
        # Room for two blocks: `dispatch_model`, which does not see the plan, fetches one ahead.
        try:
            found = place_by_time(
                model, memory, batch=batch, length=length, dtype=wanted, no_split=classes, depths=(1,)
            )
        except PlanError as error:
            raise PlacementError(error.what, fix=error.fix) from error
        return clean_device_map(found.places) if clean_result else found.places
    if batch is not None or length is not None:
        raise PlacementError("one of batch and length is missing", fix="give both or neither")
    allocator = DeviceAllocator(
        model, get_max_memory(max_memory), classes, dtype, special_dtypes or {}, fallback_allocation
    )
    device_map = allocator.fill()
    if clean_result:
        device_map = clean_device_map(device_map)
    if not offload_buffers:
        allocator.warn_of_buffers()
    if allocator.too_small:
        needs = ", ".join(f"{device}: {size} bytes required" for device, size in allocator.too_small.items())
        _log.info("no module was assigned to these devices because of insufficient memory: %s", needs)
    return device_map


def get_balanced_memory(
    model: nn.Module,
    max_memory: dict[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    dtype: Any = None,
    special_dtypes: dict[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[Any, int]:
    """Return memory limits with which accelerators share a model evenly; the last one keeps its whole memory.

    With `low_zero` the first accelerator gets only what the others cannot hold.
    """
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
    """Return the mean size of modules that hold tensors and no modules."""
    modules = {name for name in sizes if any(other.startswith(name + ".") for other in sizes)} - {""}
    leaves = [name for name in modules if not any(other.startswith(name + ".") for other in modules)]
    return int(sum(sizes[name] for name in leaves) / max(len(leaves), 1))


def _as_list(classes: Any) -> list[str]:
    if classes is None:
        return []
    return [classes] if isinstance(classes, str) else list(classes)


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Merge the entries of modules whose submodules are all on one device, in place; return the map.

    >>> clean_device_map({"a.x": 0, "a.y": 0, "b": 1})
    {'b': 1, 'a': 0}
    """
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


def check_device_map(model: nn.Module, device_map: dict[str, Any]) -> None:
    """Raise `PlacementError` if a tensor has no device; warn of names that are no module of the model."""
    modules = [name for name, _ in model.named_modules()]
    tensors = [*model.state_dict(), *(name for name, _ in model.named_parameters())]
    unknown = [key for key in device_map if key not in modules and key not in tensors and key != ""]
    if unknown:
        warnings.warn(
            f"The following device_map keys do not match any submodules in the model: {unknown}",
            UserWarning,
            stacklevel=2,
        )
    if "" in device_map:
        return
    missing = [name for name in model.state_dict() if not any(is_inside(name, key) for key in device_map)]
    if missing:
        raise PlacementError(
            f"the device map has no device for {', '.join(missing)}", fix="add an entry for each, or one for ''"
        )


def check_tied_parameters_on_same_device(tied_params: list[list[str]], device_map: dict[str, Any]) -> None:
    """Warn of tied parameters that the map places on different devices."""
    for group in tied_params:
        devices = {name: next((d for key, d in device_map.items() if is_inside(name, key)), None) for name in group}
        if len(set(devices.values())) > 1:
            _log.warning("Tied parameters are on different devices: %s. Please modify your device map.", devices)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether a transformers config ties the embeddings."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "tie_word_embeddings", False))
