"""The usual entities of XML in one compiled pass. Compiled by numba on first use and cached; no compiler is needed."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
# What stands behind `&`, as a number, and the character; `amp` and `apos` begin alike, `lt` and `gt` end alike.
_LT, _GT, _AMP, _QUOT, _APOS, _NEWLINE, _RETURN = (
    int.from_bytes(name, "big") for name in (b"lt;", b"gt;", b"amp;", b"quot;", b"apos;", b"#xA;", b"#xD;")
)


def replaced(value: bytes) -> bytes | None:
    """The value with its entities replaced; None where one is none of the usual."""
    content = np.empty(len(value), np.uint8)
    length = _replace(np.frombuffer(value, np.uint8), content)
    return content[:length].tobytes() if length >= 0 else None


@numba.njit(cache=True, nogil=True)
def _replace(value: Bytes, out: Bytes) -> int:
    size = value.size
    used = at = 0
    while at < size:
        byte = value[at]
        at += 1
        if byte == 38:
            code = 0
            begin = at
            while at < size and at - begin < 5:
                code = (code << 8) | value[at]
                at += 1
                if code & 255 == 59:
                    break
            if code == _LT:
                byte = 60
            elif code == _GT:
                byte = 62
            elif code == _NEWLINE:
                byte = 10
            elif code == _AMP:
                byte = 38
            elif code == _QUOT:
                byte = 34
            elif code == _APOS:
                byte = 39
            elif code == _RETURN:
                byte = 13
            else:
                return -1
        out[used] = byte
        used += 1
    return used
