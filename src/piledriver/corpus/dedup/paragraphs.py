"""Lines and paragraphs of a text: how they are compared, and the text without some of them."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Literal

from piledriver.corpus.dedup.repeated import Hash, hash_text, normalise_case_and_space

Unit = Literal["paragraph", "line"]
_BREAKS = {"line": re.compile(r"(\n+)"), "paragraph": re.compile(r"(\n[ \t\r]*\n\s*)")}


def split_units(text: str, unit: Unit, min_characters: int) -> list[tuple[str, str, Hash | None]]:
    """Return (unit, the break after it, its hash or None if it is too short to compare); joined they are the text."""
    parts = _BREAKS[unit].split(text)
    found = []
    for at in range(0, len(parts), 2):
        normal = normalise_case_and_space(parts[at])
        hashed = hash_text(normal) if len(normal) >= min_characters else None
        found.append((parts[at], parts[at + 1] if at + 1 < len(parts) else "", hashed))
    return found


def remove_units(
    text: str, unit: Unit, min_characters: int, first: int, repeated: Container[int]
) -> tuple[str, int, int]:
    """Return (the text without repeated units, how many were removed, how many were compared).

    `first` is the ordinal of the text's first compared unit; `repeated` holds ordinals.

    >>> remove_units("one\\ntwo\\none\\nend", "line", 3, 0, {2})
    ('one\\ntwo\\nend', 1, 4)
    """
    kept, removed, compared = [], 0, 0
    for part, following, hashed in split_units(text, unit, min_characters):
        if hashed is not None:
            compared += 1
            if first + compared - 1 in repeated:
                removed += 1
                continue
        kept.append((part, following))
    if not removed:
        return text, 0, compared
    # The break after the last unit that is left stood before a removed one.
    return "".join(part + following for part, following in kept).rstrip("\n"), removed, compared
