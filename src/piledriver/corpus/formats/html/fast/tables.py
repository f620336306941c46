"""Lookup tables of the scanner: names of tags, entities and classes as numbers."""

from __future__ import annotations

from html.entities import name2codepoint

import numpy as np

from piledriver.corpus.formats.html.fast.lines import Ints

# Beginnings (at most eight letters) of class names that may hide an element: `_UNSEEN_HINTS` of `html/convert.py`.
HINTS = (
    *("sr-only", "visually", "screen-r", "gutter", "lineno", "line-num", "blob-num", "editsect", "headerli"),
    *("anchorjs", "pagen", "MathJax", "katex-ht", "mwe-math"),
)


def code_of(name: str) -> int:
    """Return the last eight letters of a name as a number."""
    return int.from_bytes(name.encode()[-8:], "big")


def table(values: dict[int, int], slots: int) -> Ints:
    """Return a hash table of (code, value) rows with linear probing from row `code % slots`."""
    rows = np.zeros((2 * slots, 2), np.int64)
    for code, value in values.items():
        slot = code % slots
        while rows[slot, 0]:
            slot += 1
        rows[slot] = code, value
    return rows


ENTITY_SLOTS = 1021
ENTITIES = table({code_of(name): point for name, point in name2codepoint.items()}, ENTITY_SLOTS)
HINT_CODES = np.array([code_of(hint) for hint in HINTS], np.int64)
HINT_MASKS = np.array([-1 if len(hint) == 8 else (1 << 8 * len(hint)) - 1 for hint in HINTS], np.int64)
NO_LANGUAGES = np.array(
    [code_of(name) for name in ("default", "none", "source", "text", "plain", "code", "auto")], np.int64
)
