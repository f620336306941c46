"""The largest layers of a model, sizes as text, and bytes that devices have free."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from piledriver.plan.placement.sizes import compute_module_sizes
from piledriver.serve.placement.errors import PlacementError
from piledriver.serve.placement.maps.host_memory import available_host_memory

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(i?)B", re.IGNORECASE)


def convert_file_size_to_int(size: int | str) -> int:
    """Return the bytes of a size such as 5GB or 2GiB.

    >>> convert_file_size_to_int("5GB"), convert_file_size_to_int("2KiB")
    (5000000000, 2048)
    """
    if isinstance(size, int):
        return size
    found = _SIZE.fullmatch(size.strip())
    if found is None:
        raise PlacementError(
            f"size {size!r} is not in a valid format",
            fix="give a number of bytes, or one with a unit, as 5GB",
        )
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Any = None, special_dtypes: dict[str, Any] | None = None
) -> int:
    """Return the bytes of all buffers."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: list[tuple[str, Any]], module_sizes: dict[str, int], no_split_module_classes: list[str]
) -> tuple[int, list[str]]:
    """Return the size of the largest module that cannot be split, and the names of the modules of that size."""
    largest, names = 0, []
    queue = list(modules)
    while queue:
        name, module = queue.pop(0)
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in no_split_module_classes:
            queue = [(f"{name}.{child_name}", child) for child_name, child in children] + queue
            continue
        # A module whose parameters are all tied to another one has no size of its own.
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of the whole model, and of its largest layer with its names."""
    sizes = compute_module_sizes(model)
    no_split = list(getattr(model, "_no_split_modules", None) or [])
    modules = [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]
    return sizes[""], get_max_layer_size(modules, sizes, no_split)


def get_max_memory(max_memory: dict[Any, Any] | None = None) -> dict[Any, int]:
    """Return bytes by device: those given, accelerators first, or those that each device has free."""
    if max_memory is None:
        found: dict[Any, int] = {
            index: torch.cuda.mem_get_info(index)[0]
            for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        }
        found["cpu"] = available_host_memory()
        return found
    given = {key: convert_file_size_to_int(value) for key, value in max_memory.items()}
    known = ("mps", "cpu", "disk")
    for key in given:
        if not isinstance(key, int) and key not in known:
            raise PlacementError(
                f"max_memory: unknown device {key!r}", fix=f"use the integer of an accelerator, or {', '.join(known)}"
            )
    numbered = sorted(key for key in given if isinstance(key, int))
    return {key: given[key] for key in [*numbered, *(key for key in known if key in given)]}


def memory_limits(host: str | None, device: str | None) -> dict[Any, int] | None:
    """Return `max_memory` with limits of the host and of each GPU, as 8GiB; None if neither is given.

    >>> memory_limits("1KiB", None)["cpu"]
    1024
    """
    if host is None and device is None:
        return None
    found = get_max_memory()
    limits = {place: host if place == "cpu" else device for place in found}
    return {
        place: free if limits[place] is None else convert_file_size_to_int(str(limits[place]))
        for place, free in found.items()
    }
