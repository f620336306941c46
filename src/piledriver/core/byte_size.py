"""Sizes in bytes with a unit, such as 5GB or 500MiB."""

from __future__ import annotations

import re

from piledriver.core.errors import UsageError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)


class BadSizeError(UsageError):
    """A size that is not a number of bytes with an optional unit."""


def parse_size(size: int | str) -> int:
    """Return the bytes of a size.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(100)
    (5000000000, 1572864, 100)
    """
    if isinstance(size, int):
        return size
    found = _SIZE.fullmatch(size)
    if found is None or found[2].upper() not in _UNITS:
        raise BadSizeError(f"{size!r} is not a size in bytes", fix="write it like '5GB' or '500MiB'")
    return int(float(found[1]) * _UNITS[found[2].upper()])
