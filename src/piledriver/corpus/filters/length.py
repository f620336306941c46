"""Bounds on the length of a document."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.corpus.document import Document
from piledriver.corpus.filters import Drop


@dataclass(frozen=True, kw_only=True)
class Length:
    """Drop documents with too few or too many characters.

    >>> Length(min_characters=10)(Document("short"))
    Drop(reason='too short', detail='5 characters')
    """

    min_characters: int = 1
    """Drop documents with fewer."""
    max_characters: int | None = None
    """Drop documents with more."""

    def __call__(self, document: Document) -> Document | Drop:
        """Judge one document."""
        characters = len(document.text)
        if characters < self.min_characters:
            return Drop("too short", f"{characters} characters")
        if self.max_characters is not None and characters > self.max_characters:
            return Drop("too long", f"{characters} characters")
        return document
