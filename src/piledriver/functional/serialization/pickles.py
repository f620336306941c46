"""Pickles of data: containers, numbers, and numpy's and jax's arrays; any other name in them is rejected.

numpy's own constructors can be asked for arrays of pointers, so none of them is called while a file is read: stand-ins
record what the file says, and arrays are made afterwards from whole bytes of a plain number type.
"""

from __future__ import annotations

import collections
import math
import pickle
import re
import zipfile
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from piledriver.core.safe_pickle import DAMAGED_PICKLE, ForbiddenNameError, load_restricted_pickle
from piledriver.functional.tree import Tree

_NUMPY_KINDS = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"])
_OTHER_KINDS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
# How files begin that `torch.save` wrote before it wrote zip files: a pickle of a magic number.
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# What reading a file that is damaged, or that names more than data, may raise.
BROKEN = (*DAMAGED_PICKLE, zipfile.BadZipFile)


def unpickled(content: bytes) -> Any:
    """Return the data in a pickle or a torch file: tensors for arrays, trees for mappings. Raises one of `BROKEN`."""
    if not content.startswith(_OLD_TORCH) and not zipfile.is_zipfile(BytesIO(content)):
        return tensors_in(load_restricted_pickle(BytesIO(content), _ALLOWED))
    try:
        return tensors_in(torch.load(BytesIO(content), map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        # torch's own message advises to load it all the same.
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise ForbiddenNameError(named[1]) if named else pickle.UnpicklingError("it holds more than tensors") from error


def tensors_in(value: Any) -> Any:
    """Return the value with trees for mappings and tensors for arrays."""
    if isinstance(value, Mapping):
        return Tree({str(name): tensors_in(below) for name, below in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(tensors_in(below) for below in value)
    return value.tensor() if isinstance(value, _Array) else value


class _Kind:
    """The dtype that a file names."""

    def __init__(self, name: Any, *_: Any) -> None:
        if name not in _NUMPY_KINDS and name not in _OTHER_KINDS:
            raise pickle.UnpicklingError(f"it has an array of {name!r}, which is not a plain number")
        self.name: str = name
        self.order = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1] if state[1] in ("<", ">", "=") else "="


class _Array:
    """The array that a file describes; `tensor` makes it."""

    def __init__(self, *_: Any) -> None:
        self.shape: tuple[int, ...] = (0,)
        self.kind = _Kind("f4")
        self.is_fortran = False
        self.content = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, content = state
        self.fill(shape, kind, is_fortran, content)

    def fill(self, shape: Any, kind: Any, is_fortran: Any, content: Any) -> _Array:
        if not isinstance(kind, _Kind) or not isinstance(content, (bytes, bytearray)):
            raise pickle.UnpicklingError("it has an array that is not made of numbers")
        self.shape, self.kind = tuple(int(size) for size in shape), kind
        self.is_fortran, self.content = bool(is_fortran), bytes(content)
        return self

    def tensor(self) -> Tensor:
        import numpy as np

        name = self.kind.name
        itemsize = getattr(torch, name).itemsize if name in _OTHER_KINDS else np.dtype(name).itemsize
        if min(self.shape, default=0) < 0 or math.prod(self.shape) * itemsize != len(self.content):
            raise pickle.UnpicklingError(f"an array of shape {self.shape} has {len(self.content)} bytes")
        stored = f"u{itemsize}" if name in _OTHER_KINDS else self.kind.order + name
        array = np.frombuffer(self.content, stored).reshape(self.shape, order="F" if self.is_fortran else "C")
        native = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        made = torch.from_numpy(native)
        return made.view(getattr(torch, name)) if name in _OTHER_KINDS else made


def _from_buffer(content: Any, kind: Any, shape: Any, order: Any, *_: Any) -> _Array:
    return _Array().fill(shape, kind, order == "F", content)


def _scalar(kind: Any, content: Any = b"") -> Any:
    return _Array().fill((), kind, False, content).tensor().item()


def _jax_array(_function: Any, _args: Any, state: Any, _aval: Any) -> _Array:
    array = _Array()
    array.__setstate__(state)
    return array


def _encoded(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes bytes as {encoding}")
    return text.encode("latin1")


def _copied(content: bytes = b"") -> bytearray:
    if not isinstance(content, bytes):
        raise pickle.UnpicklingError("it makes bytes of something else")
    return bytearray(content)


_ALLOWED: dict[tuple[str, str], Any] = {
    **{("ml_dtypes", name): name for name in _OTHER_KINDS},
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("flax.core.frozen_dict", "FrozenDict"): dict,
    ("jax._src.array", "_reconstruct_array"): _jax_array,
    # Named in every pickled array, and never called.
    ("numpy", "ndarray"): "numpy.ndarray",
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _encoded,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "bytearray"): _copied,
    **{
        (f"{package}.{module}", name): made
        for package in ("numpy.core", "numpy._core")
        for module, name, made in (
            ("multiarray", "_reconstruct", _Array),
            ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _from_buffer),
        )
    },
}
