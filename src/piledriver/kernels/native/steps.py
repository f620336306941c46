"""The structures of step.h and decode.c."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

MOST_ROWS = 8
"""Rows whose products are bound by reading the weight; beyond, oneDNN's tiles are faster."""
LEAST_PART = 4
"""Rows that share the registers of a tile on every machine; more are several parts on some."""
CHUNK = 48
"""Outputs that a thread computes at a time; defined in C by a compiler flag, as the following numbers are."""
WIDEST = 16
"""Numbers of the widest vector of any machine: heads are multiples of it, and rows are padded to at most it."""
MOST_QUERY = 4096
"""Most numbers of the queries of one key-value head."""


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


KINDS = {"fp32": 0, "int8": 1, "int4": 2, "fp8": 3}
"""How a weight is stored."""


class WeightAddress(ctypes.Structure):
    """`weight`."""

    _fields_: ClassVar[Any] = [
        *_fields(ctypes.c_void_p, "data scales zeros"),
        ("group", ctypes.c_int64),
        ("kind", ctypes.c_int),
    ]


class LinearStep(ctypes.Structure):
    """`linear_step`."""

    _fields_: ClassVar[Any] = [
        ("x", ctypes.c_void_p),
        ("weight", WeightAddress),
        *_fields(ctypes.c_void_p, "norm bias residual arranged decoded out"),
        *_fields(ctypes.c_int64, "rows columns outputs gate_block"),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int),
    ]


class AttentionStep(ctypes.Structure):
    """`attention_step`."""

    _fields_: ClassVar[Any] = [
        *_fields(ctypes.c_void_p, "projected angles keys values scores out slots tables contexts"),
        *_fields(ctypes.c_int64, "rows kv_heads group dim rotary size table_width window scores_width"),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int),
    ]


class BlockAddresses(ctypes.Structure):
    """`block`."""

    _fields_: ClassVar[Any] = [
        *_fields(WeightAddress, "qkv out gate_up down"),
        *_fields(ctypes.c_void_p, "attention_norm qkv_bias out_bias mlp_norm gate_up_bias down_bias keys values"),
        *_fields(ctypes.c_int64, "window gate_block"),
    ]


class DecodeStep(ctypes.Structure):
    """`decode_step`."""

    _fields_: ClassVar[Any] = [
        ("blocks", ctypes.POINTER(BlockAddresses)),
        *_fields(ctypes.c_void_p, "x projected mixed gated arranged decoded"),
        *_fields(ctypes.c_int64, "count dim mlp_dim"),
        ("eps", ctypes.c_float),
        ("attention", AttentionStep),
    ]
