"""How many bytes a module and its parts take."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from piledriver.compat.accelerate.utils.module_tensors import named_module_tensors
from piledriver.core.errors import PiledriverError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(i?)B", re.IGNORECASE)


def dtype_byte_size(dtype: Any) -> float:
    """Bytes per element; a boolean counts as one bit."""
    if dtype is torch.bool:
        return 1 / 8
    special = {"INT2": 1 / 4, "INT4": 1 / 2, "FP8": 1}.get(getattr(dtype, "name", ""))
    return special if special is not None else torch.empty((), dtype=dtype, device="meta").element_size()


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes in a size such as 5GB or 2GiB."""
    if isinstance(size, int):
        return size
    found = _SIZE.fullmatch(size.strip())
    if found is None:
        raise ValueError(f"`size` {size} is not in a valid format. Use an integer for bytes, or a string with a unit.")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))


def compute_module_sizes(
    model: nn.Module, dtype: Any = None, special_dtypes: dict[str, Any] | None = None, buffers_only: bool = False
) -> dict[str, int]:
    """Bytes of every tensor and of every module that holds it; the whole under the empty name."""
    wanted = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    sizes: dict[str, Any] = defaultdict(int)
    tensors: Any = model.named_buffers(recurse=True) if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        size = _bytes_of(name, tensor, wanted, special_dtypes or {})
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += size
    return dict(sizes)


def _bytes_of(name: str, tensor: torch.Tensor, wanted: Any, special: dict[str, Any]) -> int:
    own = dtype_byte_size(tensor.dtype)
    if name in special:
        each = dtype_byte_size(special[name])
    elif wanted is None or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        each = own
    else:
        each = min(dtype_byte_size(wanted), own)
    return int(tensor.numel() * each)


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Any = None, special_dtypes: dict[str, Any] | None = None
) -> int:
    """Bytes of all buffers."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: list[tuple[str, Any]], module_sizes: dict[str, int], no_split_module_classes: list[str]
) -> tuple[int, list[str]]:
    """The largest part that cannot be split, and the names of those that are as large."""
    largest, names = 0, []
    waiting = list(modules)
    while waiting:
        name, module = waiting.pop(0)
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in no_split_module_classes:
            waiting = [(f"{name}.{child_name}", child) for child_name, child in children] + waiting
            continue
        # A module whose parameters all belong to another one has no size of its own.
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of the whole model, and its largest layer."""
    sizes = compute_module_sizes(model)
    no_split = list(getattr(model, "_no_split_modules", None) or [])
    modules = [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]
    return sizes[""], get_max_layer_size(modules, sizes, no_split)


def get_max_memory(max_memory: dict[Any, Any] | None = None) -> dict[Any, int]:
    """What each device has free, or what was given, in bytes."""
    import psutil

    if max_memory is None:
        found: dict[Any, int] = {
            index: torch.cuda.mem_get_info(index)[0]
            for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        }
        found["cpu"] = psutil.virtual_memory().available
        return found
    given = {key: convert_file_size_to_int(value) for key, value in max_memory.items()}
    known = ("mps", "cpu", "disk")
    for key in given:
        if not isinstance(key, int) and key not in known:
            raise MemoryKeyError(f"Device {key} is not recognized, available devices are integers, {', '.join(known)}")
    numbered = sorted(key for key in given if isinstance(key, int))
    return {key: given[key] for key in [*numbered, *(key for key in known if key in given)]}


class MemoryKeyError(PiledriverError, ValueError):
    """A device in `max_memory` that is none."""
