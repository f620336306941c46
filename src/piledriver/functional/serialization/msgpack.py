"""Trees of tensors as msgpack, with flax's three extension types: flax reads these files, and we read those of flax.

An array is extension 1: (shape, dtype name, bytes). Python's complex numbers are extension 2, numpy's scalars
extension 3. Reading makes containers, numbers and tensors only; no file can make it run code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from piledriver.core.errors import CorruptFileError
from piledriver.functional.errors import TreeStructureError
from piledriver.functional.state_dict import from_state_dict, to_state_dict

if TYPE_CHECKING:
    from msgspec.msgpack import Ext

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
# flax cuts larger arrays, since older msgpack readers refuse them.
_CHUNK_BYTES = 1 << 30
_CHUNKED = "__msgpack_chunked_array__"

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128"),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def to_bytes(tree: Any) -> bytes:
    """Return a tree (variables, a train state) as msgpack that flax's `from_bytes` and `msgpack_restore` read.

    >>> from_bytes({"a": torch.zeros(2)}, to_bytes({"a": torch.ones(2)}))
    {'a': tensor([1., 1.])}
    """
    return to_msgpack(to_state_dict(tree))


def from_bytes(target: Any, content: bytes) -> Any:
    """Return a tree like the target with the values that `to_bytes`, ours or flax's, wrote."""
    return from_state_dict(target, restore(content))


def restore(content: bytes) -> Any:
    """Return the nested dicts in a file, with tensors at the leaves; for files whose structure is not known."""
    import msgspec

    try:
        return _join_chunks(msgspec.msgpack.decode(content, ext_hook=_decode_extension))
    except msgspec.DecodeError as error:
        raise CorruptFileError(f"{error} (of {len(content)} bytes)") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise CorruptFileError(f"the msgpack value cannot be read: {error}") from error


def to_msgpack(value: Any) -> bytes:
    """Return nested dicts, lists, numbers, text and tensors as msgpack."""
    import msgspec

    try:
        return msgspec.msgpack.encode(_encodable(value))
    except OverflowError as error:
        raise TreeStructureError("a number does not fit in 64 bits", fix="store it as text") from error


def _encodable(value: Any) -> Any:
    if value is None or isinstance(value, (bool, bytes, bytearray)):
        return value
    if isinstance(value, (int, float, str)):
        # As exactly that type: msgspec refuses subclasses such as numpy's float64.
        return int(value) if isinstance(value, int) else float(value) if isinstance(value, float) else "".join(value)
    if isinstance(value, complex):
        return _extension(_COMPLEX, [value.real, value.imag])
    if isinstance(value, Tensor):
        if value.numel() * value.dtype.itemsize > _CHUNK_BYTES:
            return _encodable(_in_chunks(value))
        if value.dtype not in _NAMES:
            raise TreeStructureError(f"msgpack files have no {value.dtype}", fix="cast it, or use safetensors")
        return _extension(_ARRAY, [list(value.shape), _NAMES[value.dtype], _raw(value)])
    if isinstance(value, Mapping):
        return {name: _encodable(below) for name, below in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encodable(below) for below in value]
    if hasattr(value, "__array__"):
        array = value.__array__()
        if array.dtype.hasobject or array.dtype.names or array.dtype.kind in "USMm":
            raise TreeStructureError(f"cannot write an array of {array.dtype}", fix="keep numbers in arrays")
        return _extension(_ARRAY, [list(array.shape), array.dtype.name, array.tobytes()])
    raise TreeStructureError(f"cannot write a {type(value).__name__}", fix="keep tensors and numbers in the tree")


def _extension(code: int, parts: list[Any]) -> Ext:
    import msgspec

    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(parts))


def _decode_extension(code: int, data: memoryview) -> Any:
    import msgspec

    parts = msgspec.msgpack.decode(data)
    if code in (_ARRAY, _SCALAR) and isinstance(parts, list) and len(parts) == 3:
        tensor = _tensor(*parts)
        if code == _ARRAY:
            return tensor
        if tensor.numel() != 1:
            raise CorruptFileError(f"a number has the shape {tuple(tensor.shape)}")
        return tensor.item()
    if code == _COMPLEX and isinstance(parts, list) and [type(part) for part in parts] == [float, float]:
        return complex(*parts)
    raise CorruptFileError(f"unknown msgpack extension {code}")


def _raw(tensor: Tensor) -> bytes:
    if tensor.is_meta or tensor.layout != torch.strided:
        kind = "meta" if tensor.is_meta else str(tensor.layout)
        raise TreeStructureError(f"cannot write a {kind} tensor", fix="write one that holds its numbers, `to_dense()`")
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    flat = full.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _tensor(shape: Any, dtype: Any, content: Any) -> Tensor:
    is_shape = isinstance(shape, list) and all(isinstance(size, int) and size >= 0 for size in shape)
    if not is_shape or not isinstance(dtype, (str, bytes)) or not isinstance(content, bytes):
        raise CorruptFileError("an array in the file has no shape, dtype and bytes")
    name = dtype.decode(errors="replace") if isinstance(dtype, bytes) else dtype
    if name not in _DTYPES:
        raise CorruptFileError(f"the file has an array of {name!r}, which torch lacks", fix="cast it and write again")
    kind = _DTYPES[name]
    if math.prod(shape) * kind.itemsize != len(content):
        raise CorruptFileError(f"an array of shape {tuple(shape)} and dtype {name} has {len(content)} bytes")
    if not content:
        return torch.empty(tuple(shape), dtype=kind)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(kind).reshape(tuple(shape))


def _in_chunks(tensor: Tensor) -> dict[str, Any]:
    pieces = torch.split(tensor.detach().reshape(-1), max(1, _CHUNK_BYTES // tensor.dtype.itemsize))
    return {
        _CHUNKED: True,
        "shape": {str(i): size for i, size in enumerate(tensor.shape)},
        "chunks": {str(i): piece for i, piece in enumerate(pieces)},
    }


def _join_chunks(value: Any) -> Any:
    if isinstance(value, list):
        return [_join_chunks(below) for below in value]
    if isinstance(value, dict):
        if not all(isinstance(name, (str, int, bytes)) for name in value):
            raise CorruptFileError("a mapping in the file has a key that is not text")
        if _CHUNKED not in value:
            return {name: _join_chunks(below) for name, below in value.items()}
        try:
            shape = [value["shape"][str(i)] for i in range(len(value["shape"]))]
            return torch.cat([value["chunks"][str(i)].reshape(-1) for i in range(len(value["chunks"]))]).reshape(shape)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise CorruptFileError(f"an array in pieces does not fit together: {error}") from error
    if isinstance(value, (type(None), bool, int, float, complex, str, bytes, Tensor)):
        return value
    raise CorruptFileError(f"the file has a {type(value).__name__}, which is not data of a tree")
