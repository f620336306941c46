"""Encode any `state_dict` as JSON for the structure and tensors by key, without pickle.

`split_state` encodes a state and `rebuild_state` decodes it to the same types: tuples, sets, bytes, NumPy arrays and
dictionaries with keys other than strings are restored exactly. A value that JSON lacks is an object whose key `$` names
the type.
"""

from __future__ import annotations

import base64
import datetime
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, cast

import numpy as np
import torch

from piledriver.checkpoint.errors import UnsupportedStateError

Json = Any
PutTensor = Callable[[str, torch.Tensor], Json]
GetTensor = Callable[[Mapping[str, Any]], torch.Tensor]

_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "size": torch.Size,
}
_MAPPINGS: dict[str, Callable[[Iterable[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda items: Counter(dict(items)),
}


def split_state(state: Any, prefix: str) -> tuple[Json, dict[str, torch.Tensor]]:
    """Return the JSON structure of a state, and its tensors under keys that start with `prefix`.

    >>> tree, tensors = split_state({"lr": 0.1, "betas": (0.9, 0.99), "m": torch.ones(2)}, "optimizers/0")
    >>> tree
    {'lr': 0.1, 'betas': {'$': 'tuple', 'v': [0.9, 0.99]}, 'm': {'$': 'tensor', 'key': 'optimizers/0/m'}}
    >>> rebuild_state(tree, lambda found: tensors[found["key"]])
    {'lr': 0.1, 'betas': (0.9, 0.99), 'm': tensor([1., 1.])}
    """
    tensors: dict[str, torch.Tensor] = {}
    keys: dict[int, str] = {}

    def put(path: str, tensor: torch.Tensor) -> Json:
        # An object that occurs twice (tied parameters) is written once.
        if (known := keys.get(id(tensor))) is None:
            known = path
            while known in tensors:
                known += "~"
            keys[id(tensor)] = known
            tensors[known] = tensor
        return {"$": "tensor", "key": known}

    return encode_value(state, prefix, put), tensors


def encode_value(value: Any, path: str, put: PutTensor) -> Json:
    """Return a value as JSON; each tensor is replaced by what `put(path, tensor)` returns."""
    if value is None or isinstance(value, bool | str):
        return value if not isinstance(value, str) else str(value)
    if isinstance(value, torch.Tensor):
        return put(path, value)
    if isinstance(value, np.generic):
        return {"$": "npscalar", "dtype": value.dtype.str, "v": _text(value.tobytes())}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$": "float", "v": repr(float(value))}
    if isinstance(value, list):
        return [encode_value(item, f"{path}/{i}", put) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, put)
    for name, kind in (
        ("size", torch.Size),
        ("tuple", tuple),
        ("frozenset", frozenset),
        ("set", set),
        ("deque", deque),
    ):
        if isinstance(value, kind):
            items = sorted(value, key=repr) if isinstance(value, set | frozenset) else cast(Iterable[Any], value)
            return {"$": name, "v": [encode_value(item, f"{path}/{i}", put) for i, item in enumerate(items)]}
    return _encode_leaf(value, path, put)


def _encode_leaf(value: Any, path: str, put: PutTensor) -> Json:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {"$": "ndarray", "dtype": value.dtype.str, "shape": list(value.shape), "v": _text(value.tobytes())}
    if isinstance(value, bytes | bytearray):
        return {"$": "bytes", "v": _text(bytes(value))}
    if isinstance(value, complex):
        return {"$": "complex", "v": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype | torch.device):
        return {"$": type(value).__name__, "v": str(value).removeprefix("torch.")}
    if isinstance(value, range):
        return {"$": "range", "v": [value.start, value.stop, value.step]}
    if isinstance(value, datetime.datetime):
        return {"$": "datetime", "v": value.isoformat()}
    if isinstance(value, PurePath):
        return {"$": "path", "v": str(value)}
    raise UnsupportedStateError(
        f"{path} holds a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold",
        fix="return tensors, arrays, numbers, text and containers of these from state_dict()",
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, put: PutTensor) -> Json:
    plain = type(value) in (dict, defaultdict) or not isinstance(value, OrderedDict | Counter)
    if plain and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode_value(item, f"{path}/{key}", put) for key, item in value.items()}
    kind = "ordered" if isinstance(value, OrderedDict) else "counter" if isinstance(value, Counter) else "dict"
    return {
        "$": kind,
        "v": [[encode_value(k, path, put), encode_value(v, f"{path}/{k}", put)] for k, v in value.items()],
    }


def rebuild_state(tree: Json, get: GetTensor) -> Any:
    """Decode what `split_state` encoded; `get` returns the tensor of a `{"$": "tensor", ...}` object."""
    if isinstance(tree, list):
        return [rebuild_state(item, get) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get("$")
    if kind is None:
        return {key: rebuild_state(item, get) for key, item in tree.items()}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](rebuild_state(item, get) for item in tree["v"])
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]((rebuild_state(k, get), rebuild_state(v, get)) for k, v in tree["v"])
    return get(tree) if kind in ("tensor", "inline") else _rebuild_leaf(kind, tree)


def _rebuild_leaf(kind: str, tree: dict[str, Any]) -> Any:
    value = tree["v"]
    match kind:
        case "npscalar":
            return np.frombuffer(_bytes(value), dtype=np.dtype(tree["dtype"]))[0]
        case "ndarray":
            return np.frombuffer(_bytes(value), dtype=np.dtype(tree["dtype"])).reshape(tree["shape"]).copy()
        case "float":
            return float(value)
        case "bytes":
            return _bytes(value)
        case "complex":
            return complex(float(value[0]), float(value[1]))
        case "dtype":
            return dtype_of(value)
        case "device":
            return torch.device(value)
        case "range":
            return range(*value)
        case "datetime":
            return datetime.datetime.fromisoformat(value)
        case "path":
            return Path(value)
    raise UnsupportedStateError(
        f"the checkpoint holds a value of unknown type {kind!r}", fix="read it with a newer piledriver"
    )


def tensor_keys(tree: Json) -> list[str]:
    """Return the keys of all tensors in a tree, in order."""
    if isinstance(tree, list):
        return [key for item in tree for key in tensor_keys(item)]
    if isinstance(tree, dict):
        if tree.get("$") == "tensor":
            return [tree["key"]]
        return [key for item in tree.values() for key in tensor_keys(item)]
    return []


def inline_tensor(tensor: torch.Tensor) -> Json:
    """Encode a small tensor inside the JSON itself, as per-rank states (random generators) are stored."""
    data = tensor.detach().cpu().contiguous()
    raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return {"$": "inline", "dtype": str(data.dtype).removeprefix("torch."), "shape": list(data.shape), "v": _text(raw)}


def encode_inline(state: Any, name: str) -> Json:
    """Return a state as JSON with its tensors inline."""
    return encode_value(state, name, lambda _, tensor: inline_tensor(tensor))


def summary(shared: Mapping[str, list[Json]], own: Iterable[str]) -> dict[str, Any]:
    """Return what a header says of the contents: tensors of each object, and the names of the states of each rank."""
    counts = {kind: [{"tensors": len(set(tensor_keys(state)))} for state in states] for kind, states in shared.items()}
    return {**counts, "own": sorted(own)}


def tensor_from_inline(tree: Mapping[str, Any]) -> torch.Tensor:
    """Decode what `inline_tensor` encoded."""
    dtype = dtype_of(tree["dtype"])
    raw = _bytes(tree["v"])
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(tree["shape"])


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a name such as `float32`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedStateError(f"torch has no dtype {name!r}", fix="read the checkpoint with a newer torch")
    return dtype


def merge_state_trees(first: Json, second: Json) -> Json:
    """Return the union of the trees of two ranks, which may hold different layers (pipeline stages)."""
    if isinstance(first, dict) and isinstance(second, dict) and "$" not in first and "$" not in second:
        both = {key: merge_state_trees(value, second[key]) if key in second else value for key, value in first.items()}
        return both | {key: value for key, value in second.items() if key not in first}
    if isinstance(first, list) and isinstance(second, list):
        if all(isinstance(item, str) for item in first + second):
            return first + [item for item in second if item not in set(first)]
        if len(first) == len(second):
            return [merge_state_trees(a, b) for a, b in zip(first, second, strict=True)]
    return first


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def mapping_items(tree: Json) -> list[tuple[Any, Json]]:
    """Return the items of an encoded mapping with decoded keys and encoded values.

    >>> mapping_items(split_state({0: 1.5}, "")[0])
    [(0, 1.5)]
    """
    if tree.get("$") in _MAPPINGS:
        return [(rebuild_state(key, tensor_from_inline), value) for key, value in tree["v"]]
    return list(tree.items())
