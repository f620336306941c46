"""Parse lines of a metrics file into numbers, whatever the lines hold."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec

NAME_LENGTH = 200
_DEPTH = 3
_WORDS = {
    "nan": math.nan,
    "inf": math.inf,
    "infinity": math.inf,
    "-inf": -math.inf,
    "-infinity": -math.inf,
}
_decode = msgspec.json.Decoder().decode


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line, None for a line that holds none; NaN and Infinity are numbers.

    >>> parse_row(b'{"loss": NaN}'), parse_row(b'{"loss": 1'), parse_row(b'[1]')
    ({'loss': nan}, None, None)
    """
    try:
        row = _decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        try:
            # Python writes NaN and Infinity, which JSON lacks.
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None


def numbers_of(row: dict[str, Any], prefix: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, float]]:
    """Yield (name, number) of a row, nested ones by path; null is NaN, text and lists are left out.

    >>> dict(numbers_of({"a": 1, "b": {"c": True}, "d": "inf", "e": "text"}))
    {'a': 1.0, 'b/c': 1.0, 'd': inf}
    """
    for key, value in row.items():
        kind = type(value)
        if kind is float:
            yield prefix + key, value
        elif kind is int or kind is bool:
            try:
                yield prefix + key, float(value)
            except OverflowError:
                yield prefix + key, math.inf
        elif value is None:
            yield prefix + key, math.nan
        elif kind is str:
            if len(value) < 10 and (word := _WORDS.get(value.lower())) is not None:
                yield prefix + key, word
        elif kind is dict and depth > 0:
            yield from numbers_of(value, f"{prefix + key}/", depth - 1)
