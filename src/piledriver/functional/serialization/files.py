"""Trees in files: safetensors (whole or in part), msgpack, and pickles read with nothing but data allowed.

In safetensors a leaf's name is its dotted path; a dot inside a name is written `%2E`. Leaves that are not tensors go to
the header as JSON, so that counters and settings survive too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError
from piledriver.functional.errors import TreeStructureError
from piledriver.functional.serialization import msgpack
from piledriver.functional.serialization.pickles import BROKEN, unpickled
from piledriver.functional.state_dict import from_state_dict, to_state_dict
from piledriver.functional.surgery import Filter, select_leaves
from piledriver.functional.tree import Tree, flatten, unflatten

_PLAIN = "piledriver.leaves"
# The format's names of dtypes.
_KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def save_safetensors(tree: Any, location: storage.Location, only: Filter | None = None) -> None:
    """Write a tree (variables, a train state), or the leaves that `only` chooses, as one safetensors file.

    DTensors are written whole: every process of their mesh must call this, and may name the same file.
    """
    import safetensors.torch

    state = to_state_dict(tree)
    if not isinstance(state, Mapping):
        raise TreeStructureError(f"a {type(tree).__name__} is not a tree", fix="give it a name: {'weight': tensor}")
    leaves = flatten(select_leaves(state, only) if only is not None else state)
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor):
            tensors[_name(path)] = _writable(path, leaf)
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            plain[_name(path)] = leaf
        else:
            raise TreeStructureError(
                f"{'.'.join(path)} is a {type(leaf).__name__}, which the file cannot hold",
                fix="keep tensors (`torch.as_tensor(array)`), numbers and text",
            )
    header = {_PLAIN: json.dumps(plain)} if plain else None
    storage.write_bytes(location, safetensors.torch.save(_apart(tensors), header))


def load_safetensors(location: storage.Location, only: Filter | None = None) -> Tree:
    """Read a tree, or the leaves that `only` chooses; of a local file nothing else is read.

    The filter sees each tensor on the meta device: its path, shape and dtype, not its numbers.
    """
    if storage.is_remote(location):
        tree = _parsed(storage.read_bytes(location), str(location))
        return tree if only is None else select_leaves(tree, only)
    from safetensors import SafetensorError, safe_open

    leaves: dict[tuple[str, ...], Any] = {}
    try:
        with safe_open(location, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict: it has no iterator
                if only is None or only(_path(name), _described(file.get_slice(name))):
                    leaves[_path(name)] = file.get_tensor(name)
            plain = json.loads((file.metadata() or {}).get(_PLAIN, "{}"))
    except OSError:
        storage.read_bytes(location)  # raises the error that names the file
        raise
    except SafetensorError as error:
        raise CorruptFileError(f"{location} is not a whole safetensors file ({error})", fix="write it again") from error
    leaves.update({_path(name): leaf for name, leaf in plain.items() if only is None or only(_path(name), leaf)})
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
    try:
        value = msgpack.restore(storage.read_bytes(location))
    except CorruptFileError as error:
        raise CorruptFileError(f"{location} is not a whole msgpack file: {error.what}", fix=error.fix) from error
    if not isinstance(value, Mapping):
        raise CorruptFileError(f"{location} holds a {type(value).__name__}, not a tree")
    return Tree(value)


def load_pickle(location: storage.Location) -> Any:
    """Read a pickle of containers, numpy arrays, jax arrays and torch tensors; reject one that names anything else.

    A pickle can name any function to call; this reader knows a short list and calls nothing else.
    """
    content = storage.read_bytes(location)
    try:
        return unpickled(content)
    except BROKEN as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CorruptFileError(f"{location} is not a pickle of plain data: {first}") from error


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


def _writable(path: tuple[str, ...], tensor: Tensor) -> Tensor:
    if tensor.dtype not in _KINDS.values() or tensor.layout != torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else f"{tensor.dtype} ({tensor.layout})"
        raise TreeStructureError(
            f"{'.'.join(path)} is a {kind} tensor, which safetensors cannot hold",
            fix="initialise it" if tensor.is_meta else "cast it, or use `save_msgpack`",
        )
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().resolve_conj().resolve_neg().contiguous()


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that share no memory, as safetensors requires: tied and sliced ones are copied."""
    seen: set[tuple[torch.device, int]] = set()
    apart = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage()
        place = (tensor.device, memory.data_ptr())
        is_whole = memory.nbytes() == tensor.numel() * tensor.element_size()
        apart[name] = tensor.clone() if place in seen or not is_whole else tensor
        seen.add(place)
    return apart


def _described(view: Any) -> Tensor:
    return torch.empty(view.get_shape(), dtype=_KINDS.get(view.get_dtype(), torch.uint8), device="meta")


def _name(path: tuple[str, ...]) -> str:
    name = ".".join(step.replace("%", "%25").replace(".", "%2E") for step in path)
    # The one name that the format keeps for itself.
    return "%5F_metadata__" if name == "__metadata__" else name


def _path(name: str) -> tuple[str, ...]:
    return tuple(step.replace("%2E", ".").replace("%5F", "_").replace("%25", "%") for step in name.split("."))
