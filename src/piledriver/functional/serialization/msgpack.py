"""The msgpack format, as much of it as trees of tensors need, and flax's three extension types.

Written out here because it is small and because a reader of untrusted files should have no way to run code. Arrays
are flax's extension 1, (shape, dtype name, bytes), so that flax's `from_bytes` reads what we write and the other way.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from piledriver.core.errors import CorruptFileError
from piledriver.functional.errors import TreeStructureError
from piledriver.functional.state_dict import from_state_dict, to_state_dict

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
# flax cuts larger arrays, since older msgpack readers refuse them.
_CHUNK_BYTES = 1 << 30
_MAX_DEPTH = 200

_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def to_bytes(tree: Any) -> bytes:
    """A tree (variables, a train state) as msgpack that flax's `from_bytes` and `msgpack_restore` read.

    >>> from_bytes({"a": torch.zeros(2)}, to_bytes({"a": torch.ones(2)}))
    {'a': tensor([1., 1.])}
    """
    pieces: list[bytes] = []
    _pack(_chunked(to_state_dict(tree)), pieces)
    return b"".join(pieces)


def from_bytes(target: Any, content: bytes) -> Any:
    """A tree like the target with the values that `to_bytes`, ours or flax's, wrote."""
    return from_state_dict(target, restore(content))


def restore(content: bytes) -> Any:
    """The nested dicts in a file, with tensors at the leaves; for files whose structure is not known."""
    reader = _Reader(content)
    value = reader.value(0)
    if reader.at != len(content):
        raise CorruptFileError(f"{len(content) - reader.at} bytes follow the end of the msgpack value")
    try:
        return _unchunked(value)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CorruptFileError(f"an array in pieces does not fit together: {error}") from error


def _pack(value: Any, out: list[bytes]) -> None:
    if value is None:
        out.append(b"\xc0")
    elif isinstance(value, bool):
        out.append(b"\xc3" if value else b"\xc2")
    elif isinstance(value, int):
        out.append(_packed_int(value))
    elif isinstance(value, float):
        out.append(b"\xcb" + struct.pack(">d", value))
    elif isinstance(value, complex):
        _pack_extension(_COMPLEX, _packed([value.real, value.imag]), out)
    elif isinstance(value, str):
        content = value.encode()
        out.append(_head(len(content), 0xA0, 32, (0xD9, 0xDA, 0xDB)) + content)
    elif isinstance(value, (bytes, bytearray)):
        out.append(_head(len(value), 0, 0, (0xC4, 0xC5, 0xC6)) + bytes(value))
    elif isinstance(value, Tensor):
        _pack_extension(_ARRAY, _packed([list(value.shape), _dtype_name(value), _raw(value)]), out)
    elif isinstance(value, Mapping):
        out.append(_head(len(value), 0x80, 16, (None, 0xDE, 0xDF)))
        for name, below in value.items():
            _pack(name, out)
            _pack(below, out)
    elif isinstance(value, (list, tuple)):
        out.append(_head(len(value), 0x90, 16, (None, 0xDC, 0xDD)))
        for below in value:
            _pack(below, out)
    elif hasattr(value, "__array__"):
        array = value.__array__()
        if array.dtype.hasobject or array.dtype.names or array.dtype.kind in "USMm":
            raise TreeStructureError(f"cannot write an array of {array.dtype}", fix="keep numbers in arrays")
        _pack_extension(_ARRAY, _packed([list(array.shape), array.dtype.name, array.tobytes()]), out)
    else:
        raise TreeStructureError(f"cannot write a {type(value).__name__}", fix="keep tensors and numbers in the tree")


def _packed(value: Any) -> bytes:
    out: list[bytes] = []
    _pack(value, out)
    return b"".join(out)


def _packed_int(value: int) -> bytes:
    if 0 <= value < 128:
        return bytes([value])
    if -32 <= value < 0:
        return struct.pack("b", value)
    for code, form, low, high in (
        (0xCC, ">B", 0, 1 << 8),
        (0xCD, ">H", 0, 1 << 16),
        (0xCE, ">I", 0, 1 << 32),
        (0xCF, ">Q", 0, 1 << 64),
        (0xD0, ">b", -(1 << 7), 0),
        (0xD1, ">h", -(1 << 15), 0),
        (0xD2, ">i", -(1 << 31), 0),
        (0xD3, ">q", -(1 << 63), 0),
    ):
        if low <= value < high:
            return bytes([code]) + struct.pack(form, value)
    raise TreeStructureError(f"the number {value} does not fit in 64 bits", fix="store it as text")


def _head(length: int, small: int, limit: int, codes: tuple[int | None, int, int]) -> bytes:
    if length < limit:
        return bytes([small | length])
    if codes[0] is not None and length < 1 << 8:
        return bytes([codes[0], length])
    if length < 1 << 16:
        return bytes([codes[1]]) + struct.pack(">H", length)
    return bytes([codes[2]]) + struct.pack(">I", length)


def _pack_extension(kind: int, content: bytes, out: list[bytes]) -> None:
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}.get(len(content))
    head = bytes([fixed]) if fixed else _head(len(content), 0, 0, (0xC7, 0xC8, 0xC9))
    out.append(head + struct.pack("b", kind) + content)


def _dtype_name(tensor: Tensor) -> str:
    if tensor.dtype not in _NAMES:
        raise TreeStructureError(f"msgpack files have no {tensor.dtype}", fix="cast it, or use safetensors")
    return _NAMES[tensor.dtype]


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


def _chunked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _chunked(below) for name, below in value.items()}
    if not isinstance(value, Tensor) or value.numel() * value.dtype.itemsize <= _CHUNK_BYTES:
        return value
    pieces = torch.split(value.detach().reshape(-1), max(1, _CHUNK_BYTES // value.dtype.itemsize))
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(i): size for i, size in enumerate(value.shape)},
        "chunks": {str(i): piece for i, piece in enumerate(pieces)},
    }


def _unchunked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "__msgpack_chunked_array__" not in value:
        return {name: _unchunked(below) for name, below in value.items()}
    shape = [value["shape"][str(i)] for i in range(len(value["shape"]))]
    return torch.cat([value["chunks"][str(i)].reshape(-1) for i in range(len(value["chunks"]))]).reshape(shape)


class _Reader:
    """A cursor over the bytes; every length is checked before it is used."""

    def __init__(self, content: bytes) -> None:
        self.content = memoryview(content)
        self.at = 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.content):
            raise CorruptFileError(f"the msgpack value is cut off at byte {len(self.content)}")
        self.at += count
        return bytes(self.content[self.at - count : self.at])

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise CorruptFileError(f"the msgpack value is nested deeper than {_MAX_DEPTH}")
        code = self.take(1)[0]
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 256
        if code < 0x90:
            return self.mapping(code & 0x0F, depth)
        if code < 0xA0:
            return self.sequence(code & 0x0F, depth)
        if code < 0xC0:
            return self.text(code & 0x1F)
        if code in _NUMBERS:
            return self.number(_NUMBERS[code])
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _FIXED_EXTENSIONS:
            return self.extension(_FIXED_EXTENSIONS[code], depth)
        if code in _SIZED:
            form, read = _SIZED[code]
            return read(self, self.number(form), depth)
        raise CorruptFileError(f"byte {self.at - 1} ({code:#x}) does not begin a msgpack value")

    def text(self, length: int) -> str:
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise CorruptFileError(f"the text at byte {self.at - length} is not UTF-8") from error

    def sequence(self, length: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(length)]

    def mapping(self, length: int, depth: int) -> dict[Any, Any]:
        made = {}
        for _ in range(length):
            name = self.value(depth + 1)
            if not isinstance(name, (str, int, bytes)):
                raise CorruptFileError(f"a mapping at byte {self.at} has a key that is not text")
            made[name] = self.value(depth + 1)
        return made

    def extension(self, length: int, depth: int) -> Any:
        kind = self.number("b")
        inner = _Reader(self.take(length))
        value = inner.value(depth + 1)
        if kind in (_ARRAY, _SCALAR) and isinstance(value, list) and len(value) == 3:
            tensor = _tensor(*value)
            if kind == _ARRAY:
                return tensor
            if tensor.numel() != 1:
                raise CorruptFileError(f"a number of shape {tuple(tensor.shape)} at byte {self.at}")
            return tensor.item()
        if kind == _COMPLEX and isinstance(value, list) and [type(one) for one in value] == [float, float]:
            return complex(*value)
        raise CorruptFileError(f"unknown msgpack extension {kind} at byte {self.at}")


_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def _read_bytes(reader: _Reader, length: int, depth: int) -> bytes:
    return reader.take(length)


def _read_text(reader: _Reader, length: int, depth: int) -> str:
    return reader.text(length)


_SIZED: dict[int, tuple[str, Callable[[_Reader, int, int], Any]]] = {
    0xC4: (">B", _read_bytes),
    0xC5: (">H", _read_bytes),
    0xC6: (">I", _read_bytes),
    0xC7: (">B", _Reader.extension),
    0xC8: (">H", _Reader.extension),
    0xC9: (">I", _Reader.extension),
    0xD9: (">B", _read_text),
    0xDA: (">H", _read_text),
    0xDB: (">I", _read_text),
    0xDC: (">H", _Reader.sequence),
    0xDD: (">I", _Reader.sequence),
    0xDE: (">H", _Reader.mapping),
    0xDF: (">I", _Reader.mapping),
}
