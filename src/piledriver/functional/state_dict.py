"""Any tree as nested dicts with string keys, and back into a tree of the same structure.

The convention is flax's: sequences become dicts of "0", "1", ..., named tuples and dataclasses dicts of their fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from piledriver.functional.errors import TreeStructureError
from piledriver.functional.random.keys import Key
from piledriver.functional.struct import replace
from piledriver.functional.tree import Tree


def to_state_dict(value: Any) -> Any:
    """Return nested dicts of leaves.

    >>> to_state_dict({"a": (1, 2)})
    {'a': {'0': 1, '1': 2}}
    """
    if isinstance(value, Mapping):
        return {str(name): to_state_dict(below) for name, below in value.items()}
    if isinstance(value, Key):
        return {"bits": value.bits, "lane": _signed(value.lane)} if value.lane else value.bits
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: to_state_dict(getattr(value, name)) for name in value._fields}
    if isinstance(value, (list, tuple)):
        return {str(i): to_state_dict(below) for i, below in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: getattr(value, name) for name in _children(value)}
        # flax's TrainState has no such field, and there is nothing in it to lose.
        return {name: to_state_dict(one) for name, one in fields.items() if not (isinstance(one, Tree) and not one)}
    return value


def from_state_dict(target: Any, state: Any, path: str = "") -> Any:
    """Return a tree like the target with the values of the state; an error names the path that differs."""
    if isinstance(target, Mapping):
        state = _checked(target, state, path)
        filled = {name: from_state_dict(below, state[str(name)], _at(path, name)) for name, below in target.items()}
        return Tree(filled) if isinstance(target, Tree) else type(target)(filled)  # type: ignore[call-arg]
    if isinstance(target, Key):
        bits, lane = (state["bits"], int(state["lane"])) if isinstance(state, Mapping) else (state, 0)
        return Key(torch.as_tensor(bits, dtype=torch.int64), lane % (1 << 64))
    if isinstance(target, tuple) and hasattr(target, "_fields"):
        state = _checked({name: getattr(target, name) for name in target._fields}, state, path)
        return type(target)(
            *(from_state_dict(getattr(target, name), state[name], _at(path, name)) for name in target._fields)
        )
    if isinstance(target, (list, tuple)):
        state = _checked({str(i): below for i, below in enumerate(target)}, state, path)
        return type(target)(from_state_dict(below, state[str(i)], _at(path, i)) for i, below in enumerate(target))
    if dataclasses.is_dataclass(target) and not isinstance(target, type):
        names = _children(target)
        state = _checked({name: getattr(target, name) for name in names}, state, path)
        return replace(
            target, **{name: from_state_dict(getattr(target, name), state[name], _at(path, name)) for name in names}
        )
    return _leaf(target, state, path)


def _signed(lane: int) -> Tensor:
    """Return the hash of the names folded into a key as an int64 tensor."""
    return torch.tensor(lane - (1 << 64) if lane >= 1 << 63 else lane, dtype=torch.int64)


def _leaf(target: Any, state: Any, path: str) -> Any:
    if isinstance(state, Mapping):
        raise TreeStructureError(f"{path or 'the root'} is a leaf here and a mapping in the file", fix="use `transfer`")
    if not isinstance(target, Tensor):
        return state.item() if isinstance(state, Tensor) and isinstance(target, (int, float, bool)) else state
    try:
        value = state if isinstance(state, Tensor) else torch.as_tensor(state)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TreeStructureError(
            f"{path} is a {type(state).__name__} in the file and a tensor here", fix="use `transfer`"
        ) from error
    if value.shape != target.shape:
        raise TreeStructureError(
            f"{path} has the shape {tuple(value.shape)} in the file and {tuple(target.shape)} here",
            fix="load into the architecture that was saved, or use `transfer`",
        )
    if not torch.can_cast(value.dtype, target.dtype):
        raise TreeStructureError(
            f"{path} is {value.dtype} in the file and {target.dtype} here",
            fix="cast the target: this would lose numbers",
        )
    return placed_like(value, target)


def placed_like(value: Tensor, target: Tensor) -> Tensor:
    """Return a value that every rank holds in full with the target's dtype, device and placements."""
    if not hasattr(target, "placements"):
        return value.to(dtype=target.dtype, device="cpu" if target.is_meta else target.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(target, DTensor)
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    whole = whole.to(dtype=target.dtype, device=target.device_mesh.device_type)
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)


def _children(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value) if not field.metadata.get("static")]


def _checked(target: Mapping[Any, Any], state: Any, path: str) -> Mapping[str, Any]:
    """Return the state if its names are the target's; parts without leaves may be absent, as in safetensors files."""
    where = path or "the root"
    if not isinstance(state, Mapping):
        raise TreeStructureError(f"{where} is a mapping here and a leaf in the file", fix="use `transfer`")
    empty: dict[str, Any] = {
        str(name): {} for name, below in target.items() if not pytree.tree_leaves(to_state_dict(below))
    }
    found = {**empty, **state}
    wanted, there = {str(name) for name in target}, set(found)
    if wanted != there:
        raise TreeStructureError(
            f"{where}: the file lacks {sorted(wanted - there) or 'nothing'} "
            f"and has {sorted(there - wanted) or 'nothing'} beyond",
            fix="load into the architecture that was saved, or use `transfer`",
        )
    return found


def _at(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
