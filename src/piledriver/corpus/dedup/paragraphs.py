"""Lines and paragraphs that occur more than once in a corpus: the first stays, the others are taken out of their texts.

Each chunk of documents gives a sorted run of hashes; a range of hashes over all runs gives the numbers of the
occurrences that are not the first. A unit is known by its ordinal in the whole corpus, so the result of a range is a
sorted list of numbers, and a chunk reads its own part of each.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

import xxhash

_BREAKS = {"line": re.compile(r"(\n+)"), "paragraph": re.compile(r"(\n[ \t\r]*\n\s*)")}


@dataclass(frozen=True, kw_only=True)
class ParagraphSettings:
    """What a unit is."""

    unit: Literal["paragraph", "line"] = "paragraph"
    """What is compared: text between blank lines, or lines."""
    min_characters: int = 100
    """Shorter ones may be repeated: headings, closing brackets."""
    min_kept: float = 0.0
    """A document of which less than this share of its characters is left is dropped."""

    def __post_init__(self) -> None:
        if self.min_characters < 1 or not 0 <= self.min_kept <= 1:
            raise ValueError("min_characters must be at least 1 and min_kept from 0 to 1")


def units(text: str, settings: ParagraphSettings) -> list[tuple[str, str, tuple[int, int] | None]]:
    """(unit, what follows it, its hash or None where it is too short to be compared); joined they are the text."""
    parts = _BREAKS[settings.unit].split(text)
    found = []
    for at in range(0, len(parts), 2):
        normal = " ".join(parts[at].lower().split())
        hashed = None
        if len(normal) >= settings.min_characters:
            value = xxhash.xxh3_128_intdigest(normal.encode("utf-8", "replace"))
            hashed = (value & 0xFFFFFFFFFFFFFFFF, value >> 64)
        found.append((parts[at], parts[at + 1] if at + 1 < len(parts) else "", hashed))
    return found


def without(text: str, settings: ParagraphSettings, first: int, repeated: Container[int]) -> tuple[str, int, int]:
    """(the text without repeated units, how many went, how many were compared); `first` is the first one's ordinal.

    >>> settings = ParagraphSettings(unit="line", min_characters=3)
    >>> without("one\\ntwo\\none\\nend", settings, 0, {2})
    ('one\\ntwo\\nend', 1, 4)
    """
    kept, removed, compared = [], 0, 0
    for unit, following, hashed in units(text, settings):
        if hashed is not None:
            compared += 1
            if first + compared - 1 in repeated:
                removed += 1
                continue
        kept.append((unit, following))
    if not removed:
        return text, 0, compared
    # What followed the last unit that is left stood before one that went.
    return "".join(unit + following for unit, following in kept).rstrip("\n"), removed, compared
