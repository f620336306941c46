"""Drop documents with words of a list. No list comes with the package: which words are unwanted is a choice, and such
lists are known to remove the speech of some groups together with the abuse of them (Dodge et al., 2021).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from piledriver.corpus.document import Document
from piledriver.corpus.filters import Drop
from piledriver.corpus.filters.urls import read_list

_WORDS = re.compile(r"\w+(?:['’]\w+)*")


@dataclass(frozen=True, kw_only=True)
class Profanity:
    """Drop documents with too many words and phrases of a list, compared as whole words without case."""

    FILES: ClassVar[tuple[str, ...]] = ("words",)

    words: str
    """A file with one word or phrase a line."""
    max_share: float = 0.0
    """Share of such words, at most; 0 drops a document at the first."""

    def __call__(self, document: Document) -> Document | Drop:
        """Judge one document."""
        unwanted, longest = _unwanted(self.words)
        words = [word.casefold() for word in _WORDS.findall(document.text)]
        found = sum(
            " ".join(words[at : at + width]) in unwanted for width in longest for at in range(len(words) - width + 1)
        )
        if found and found > self.max_share * len(words):
            return Drop("profanity", f"{found} in {len(words)} words")
        return document


@lru_cache(maxsize=4)
def _unwanted(path: str) -> tuple[frozenset[str], tuple[int, ...]]:
    """Return the phrases and the set of their lengths in words."""
    phrases = [[word.casefold() for word in _WORDS.findall(line)] for line in read_list(path)]
    return frozenset(" ".join(phrase) for phrase in phrases if phrase), tuple(sorted({len(p) for p in phrases if p}))
