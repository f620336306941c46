"""The entities of an XML attribute in one compiled pass: tables of posts have values that are whole pages.

Compiled by numba on first use and cached; no compiler is needed.
"""

from __future__ import annotations

import html

import numba
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
_NAMES = ((b"lt;", b"<"), (b"gt;", b">"), (b"amp;", b"&"), (b"quot;", b'"'), (b"apos;", b"'"), (b"#xA;", b"\n"))
_ENTITIES = np.array(
    [[*name.ljust(6, b"\0"), len(name), mark[0]] for name, mark in (*_NAMES, (b"#xD;", b"\r"))], np.int64
)


def unescaped(value: bytes) -> bytes:
    """The value that was meant.

    >>> unescaped(b"a &lt;b&gt; &amp;amp; &#xE9;").decode()
    'a <b> &amp; é'
    """
    length, content = _replaced(np.frombuffer(value, np.uint8))
    if length < 0:
        # Characters by their numbers are rare.
        return html.unescape(value.decode("utf-8", "replace")).encode("utf-8", "replace")
    return content[:length].tobytes()


@numba.njit(cache=True, nogil=True)
def _replaced(value: Bytes) -> tuple[int, Bytes]:
    out = np.empty(value.size, np.uint8)
    used = 0
    at = 0
    size = value.size
    while at < size:
        byte = value[at]
        at += 1
        if byte == 38:
            found = -1
            for entity in range(_ENTITIES.shape[0]):
                length = _ENTITIES[entity, 6]
                if at + length > size:
                    continue
                found = entity
                for place in range(length):
                    if value[at + place] != _ENTITIES[entity, place]:
                        found = -1
                        break
                if found >= 0:
                    break
            if found < 0:
                return -1, out
            byte = _ENTITIES[found, 7]
            at += _ENTITIES[found, 6]
        out[used] = byte
        used += 1
    return used, out
