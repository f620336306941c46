"""What is alive: tensors by the line that made them, autograd nodes, Python memory by line."""

from __future__ import annotations

import gc
import tracemalloc
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from piledriver.observe.leaks.lines import SourceLine, line_of, made_at

_MOST_NODES = 300_000


@dataclass
class Census:
    """Numbers of one moment; it refers to no tensor."""

    tensor_bytes: dict[SourceLine, int] = field(default_factory=dict)
    """Bytes of tensors that were made since tracing began, by line; storage that several share counts once."""
    python_bytes: dict[SourceLine, int] = field(default_factory=dict)
    """Bytes of Python objects and arrays that were made since tracing began, by line."""
    nodes: int = 0
    """Autograd nodes that live tensors reach."""
    roots: dict[SourceLine, int] = field(default_factory=dict)
    """Autograd nodes by the line of the tensor that keeps them."""


def live_tensors() -> list[Tensor]:
    """Return every tensor that Python knows."""
    # By type, and without a line of Python for each object: isinstance() asks the object, which lazy objects answer
    # with side effects, and there are some hundred thousand.
    things = gc.get_objects()
    return list(compress(things, map(_tensor_types().__contains__, map(type, things))))


def _tensor_types() -> set[type]:
    found: set[type] = set()
    waiting: list[type] = [Tensor]
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.add(kind)
            waiting += type.__subclasses__(kind)
    return found


def live_bytes() -> int:
    """Return the bytes of all live tensors."""
    return sum(dict(map(storage_of, live_tensors())).values())


def take_census(*, graphs: bool = True) -> Census:
    """Count what is alive now."""
    found = Census()
    tensors = live_tensors()
    found.tensor_bytes = bytes_by_line(tensors)
    if graphs:
        _count_nodes(tensors, found)
    del tensors
    sizes: dict[SourceLine, int] = defaultdict(int)
    for group in tracemalloc.take_snapshot().statistics("traceback"):
        line = line_of((frame.filename, frame.lineno) for frame in reversed(group.traceback))
        if line is not None:
            sizes[line] += group.size
    found.python_bytes = dict(sizes)
    return found


def bytes_by_line(tensors: Iterable[Tensor]) -> dict[SourceLine, int]:
    """Return the bytes of traced tensors by line."""
    sizes: dict[SourceLine, int] = defaultdict(int)
    seen: set[int] = set()
    for tensor in tensors:
        line = made_at(tensor)
        if line is None:
            continue
        address, size = storage_of(tensor)
        if address not in seen:
            seen.add(address)
            sizes[line] += size
    return dict(sizes)


def storage_of(tensor: Tensor) -> tuple[int, int]:
    """Return (address, bytes) of a tensor's memory; (id, 0) for one that has none of its own."""
    try:
        if tensor.device.type == "meta" or tensor.is_sparse or tensor.layout != torch.strided:
            return id(tensor), 0
        storage = tensor.untyped_storage()
        return storage.data_ptr() or id(tensor), storage.nbytes()
    except (RuntimeError, NotImplementedError, AttributeError):  # wrappers: DTensor, fake and functional tensors
        return id(tensor), 0


def _count_nodes(tensors: list[Tensor], found: Census) -> None:
    """Count the nodes that live tensors reach, and those that each outermost tensor keeps, by its line."""
    ends = [(tensor, node) for tensor in tensors if (node := _grad_fn(tensor)) is not None]
    inner: set[Any] = set()
    seen: set[Any] = set()
    waiting = [node for _, node in ends]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        below = [after for after, _ in node.next_functions if after is not None]
        inner.update(below)
        waiting += below
    found.nodes = len(seen)
    reached: dict[SourceLine, int] = defaultdict(int)
    counted: set[Any] = set()
    for tensor, node in ends:
        line = made_at(tensor) if node not in inner else None
        if line is None:
            continue
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if one in counted:
                continue
            counted.add(one)
            reached[line] += 1
            waiting += [after for after, _ in one.next_functions if after is not None]
    found.roots = dict(reached)


def _grad_fn(tensor: Tensor) -> Any:
    try:
        return None if tensor.is_leaf else tensor.grad_fn
    except RuntimeError:  # a view that was changed in place under no_grad
        return None
