"""Trees in files: safetensors (whole or in part), msgpack, and pickles read with nothing but data allowed.

In safetensors a leaf's name is its dotted path; a dot inside a name is written `%2E`. Leaves that are not tensors go to
the header as JSON, so that counters and settings survive too.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError
from piledriver.functional import msgpack
from piledriver.functional.errors import TreeStructureError
from piledriver.functional.state_dict import from_state_dict, to_state_dict
from piledriver.functional.surgery import Filter, select_leaves
from piledriver.functional.tree import Tree, flatten, unflatten

_PLAIN = "piledriver.leaves"


def save_safetensors(tree: Any, location: storage.Location, only: Filter | None = None) -> None:
    """Write a tree (variables, a train state), or the leaves that `only` chooses, as one safetensors file."""
    import safetensors.torch

    state = Tree(to_state_dict(tree))
    leaves = flatten(select_leaves(state, only) if only is not None else state)
    tensors = {_name(path): _own(leaf) for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    plain = {_name(path): leaf for path, leaf in leaves.items() if not isinstance(leaf, Tensor)}
    try:
        header = {_PLAIN: json.dumps(plain)} if plain else None
    except TypeError as error:
        raise TreeStructureError(f"a leaf cannot be written: {error}", fix="keep tensors and numbers") from error
    storage.write_bytes(location, safetensors.torch.save(tensors, header))


def load_safetensors(location: storage.Location, only: Filter | None = None) -> Tree:
    """Read a tree, or the leaves whose paths `only` chooses; of a local file nothing else is read."""
    if storage.is_remote(location):
        return _select(_parsed(storage.read_bytes(location), str(location)), only)
    from safetensors import SafetensorError, safe_open

    leaves: dict[tuple[str, ...], Any] = {}
    try:
        with safe_open(location, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict: it has no iterator
                if only is None or only(_path(name), None):
                    leaves[_path(name)] = file.get_tensor(name)
            plain = json.loads((file.metadata() or {}).get(_PLAIN, "{}"))
    except FileNotFoundError:
        storage.read_bytes(location)  # raises the error that names the file
        raise
    except SafetensorError as error:
        raise CorruptFileError(f"{location} is not a whole safetensors file ({error})", fix="write it again") from error
    leaves.update({_path(name): leaf for name, leaf in plain.items() if only is None or only(_path(name), None)})
    return unflatten(leaves)


def restore_safetensors(target: Any, location: storage.Location) -> Any:
    """Read into a tree like the target, a train state for one."""
    return from_state_dict(target, load_safetensors(location).to_dict())


def restore_part(target: Any, location: storage.Location, field: str) -> Any:
    """Replace one part of a saved state only: "params", "opt_state"; the rest of the target stays."""
    state = to_state_dict(target)
    if field not in state:
        raise TreeStructureError(f"the target has no part {field!r}", fix=f"choose from {', '.join(state)}")
    found = load_safetensors(location, lambda path, _: path[0] == field)
    if field not in found:
        raise TreeStructureError(f"{location} has no part {field!r}", fix="save it with the file")
    return from_state_dict(target, {**state, field: found[field].to_dict()})


def save_msgpack(tree: Any, location: storage.Location) -> None:
    """Write a tree as msgpack that flax reads."""
    storage.write_bytes(location, msgpack.to_bytes(tree))


def load_msgpack(location: storage.Location) -> Tree:
    """Read a msgpack file of ours or of flax's."""
    value = msgpack.restore(storage.read_bytes(location))
    if not isinstance(value, Mapping):
        raise CorruptFileError(f"{location} holds a {type(value).__name__}, not a tree")
    return Tree(value)


def load_pickle(location: storage.Location) -> Any:
    """Read a pickle of containers, numpy arrays, jax arrays and torch tensors; anything else in it is refused.

    A pickle can name any function to call; this reader knows a short list and calls nothing else.
    """
    content = storage.read_bytes(location)
    if zipfile.is_zipfile(BytesIO(content)):
        return _tensors(torch.load(BytesIO(content), map_location="cpu", weights_only=True))
    try:
        return _tensors(_DataOnly(BytesIO(content)).load())
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{location} is not a pickle of plain data: {error}") from error


class _DataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = _pickle_names().get((module, name))
        if allowed is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not data")
        return allowed


def _pickle_names() -> dict[tuple[str, str], Any]:
    import collections

    import numpy as np
    from numpy._core import multiarray, numeric

    names: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("flax.core.frozen_dict", "FrozenDict"): dict,
        ("_codecs", "encode"): _encode,
        ("jax._src.array", "_reconstruct_array"): _jax_array,
    }
    reconstruct: Callable[..., Any] = multiarray._reconstruct
    for package in ("numpy.core", "numpy._core"):
        names[f"{package}.multiarray", "_reconstruct"] = reconstruct
        names[f"{package}.multiarray", "scalar"] = multiarray.scalar
        names[f"{package}.numeric", "_frombuffer"] = numeric._frombuffer  # type: ignore[attr-defined]
    for name in ("set", "frozenset", "complex", "bytearray"):
        names["builtins", name] = {"set": set, "frozenset": frozenset, "complex": complex, "bytearray": bytearray}[name]
    try:
        import ml_dtypes
    except ImportError:
        return names
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        names["ml_dtypes", name] = getattr(ml_dtypes, name)
    return names


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes bytes as {encoding}")
    return text.encode("latin1")


def _jax_array(function: Any, args: Any, state: Any, _: Any) -> Any:
    array = function(*args)
    array.__setstate__(state)
    return array


def _tensors(value: Any) -> Any:
    import numpy as np

    if isinstance(value, Mapping):
        return Tree({str(name): _tensors(below) for name, below in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(_tensors(below) for below in value)
    if isinstance(value, np.ndarray):
        if value.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            return torch.from_numpy(value.view(np.uint8).copy()).view(getattr(torch, value.dtype.name))
        return torch.from_numpy(np.array(value))
    return value.item() if isinstance(value, np.generic) else value


def _parsed(content: bytes, where: str) -> Tree:
    import safetensors.torch
    from safetensors import SafetensorError

    try:
        tensors = safetensors.torch.load(content)
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    except (SafetensorError, ValueError) as error:
        raise CorruptFileError(f"{where} is not a whole safetensors file ({error})", fix="write it again") from error
    return unflatten({_path(name): leaf for name, leaf in {**tensors, **json.loads(header.get(_PLAIN, "{}"))}.items()})


def _select(tree: Tree, only: Filter | None) -> Tree:
    return tree if only is None else select_leaves(tree, only)


def _own(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    # safetensors refuses tensors that share memory; tied or sliced ones get their own.
    return full.detach().contiguous().clone() if full._base is not None else full.detach().contiguous()


def _name(path: tuple[str, ...]) -> str:
    return ".".join(step.replace("%", "%25").replace(".", "%2E") for step in path)


def _path(name: str) -> tuple[str, ...]:
    return tuple(step.replace("%2E", ".").replace("%25", "%") for step in name.split("."))
