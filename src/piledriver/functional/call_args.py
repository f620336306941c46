"""Arguments of `init` and `apply`: converted for modules, with an error for what is in the wrong place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from piledriver.functional.errors import InputShapeError, MissingKeyError, TransformError, VariablesError
from piledriver.functional.frame import Store
from piledriver.functional.random.keys import Key
from piledriver.functional.tree import Tree, freeze

Variables = Mapping[str, Any]
Mutable = bool | str | Iterable[str]


def stores_of(variables: Variables) -> dict[str, Store]:
    """Return the collections of variables by name."""
    if not hasattr(variables, "items"):  # plain enough for every compiler of torch
        raise VariablesError(
            f"the variables are of type {type(variables).__name__}, not a tree of collections",
            fix="`variables = module.init(key(0), x)`, then `module.apply(variables, x)`",
        )
    stores: dict[str, Store] = {}
    for name, collection in variables.items():
        tree = freeze(collection)
        if not isinstance(tree, Tree):
            raise TransformError(
                f"the collection {name!r} is a {type(collection).__name__}, not a mapping",
                fix="pass variables by collection, such as {'params': params}",
            )
        stores[name] = tree._data
    return stores


def streams_of(rngs: Mapping[str, Key] | None) -> Mapping[str, Key]:
    """Return keys by stream."""
    if isinstance(rngs, Key):
        raise VariablesError("`rngs` is one key without a stream", fix="name its stream: `rngs={'dropout': key}`")
    return {} if rngs is None else rngs


def root_key(key: Key | Mapping[str, Key]) -> Key:
    """Return the key that parameters are made from."""
    root = key.get("params") if isinstance(key, Mapping) else key
    if root is None:
        raise MissingKeyError("params", (), key)  # type: ignore[arg-type]
    if not isinstance(root, Key):
        raise VariablesError(
            f"`init` was given something of type {type(root).__name__} where its key belongs",
            fix="`module.init(key(0), x)`",
        )
    return root


def collections_of(mutable: Mutable) -> frozenset[str] | None:
    """Return the collections that may change, or None for all."""
    if mutable is True:
        return None
    if mutable is False:
        return frozenset()
    return frozenset((mutable,)) if isinstance(mutable, str) else frozenset(mutable)


def checked_example(example: Any) -> list[Any]:
    """Return the leaves of an example; arrays of other libraries are an error."""
    leaves = pytree.tree_leaves(example)
    for leaf in leaves:
        shape: Any = getattr(leaf, "shape", ())
        if not isinstance(leaf, Tensor) and hasattr(leaf, "__array__") and len(shape):
            raise InputShapeError((), f"the example holds a {type(leaf).__name__}", "pass `torch.as_tensor(x)`")
    return leaves


def stand_in(mode: Any, tensor: Tensor) -> Tensor:
    """Return a tensor without data in a fake mode; one on meta stands for one on the default device."""
    if tensor.device.type == "meta":
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=torch.get_default_device())
    return mode.from_tensor(tensor)  # type: ignore[no-any-return]


def device_of(tree: Any) -> torch.device:
    """Return the device of the first tensor; inputs on meta stand for ones on the default device."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.device.type != "meta":
            return leaf.device
    return torch.get_default_device()
