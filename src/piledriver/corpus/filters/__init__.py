"""Filters: each judges one document and returns it, perhaps changed, or a `Drop` with the reason.

Another package adds a filter through the entry-point group `piledriver.filter`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from piledriver.core.registry import Registry
from piledriver.corpus.document import Document


@dataclass(frozen=True)
class Drop:
    """The verdict that drops a document: `reason`, a short stable phrase to count by, and `detail`, the value."""

    reason: str
    detail: str = ""


class Filter(Protocol):
    """A frozen dataclass whose fields are the settings, and which judges one document at a time.

    Settings that name files are listed in a class variable `FILES`.
    """

    def __call__(self, document: Document) -> Document | Drop:
        """Return the document, unchanged or changed, or the reason to drop it."""


FILTERS: Registry[type[Filter]] = Registry(
    "filter",
    {
        "length": "piledriver.corpus.filters.length:Length",
        "gopher-quality": "piledriver.corpus.filters.gopher:GopherQuality",
        "gopher-repetition": "piledriver.corpus.filters.gopher:GopherRepetition",
        "c4": "piledriver.corpus.filters.c4:C4",
        "fineweb": "piledriver.corpus.filters.fineweb:FineWeb",
        "language": "piledriver.corpus.filters.language:Language",
        "urls": "piledriver.corpus.filters.urls:Urls",
        "code": "piledriver.corpus.filters.code:Code",
        "pii": "piledriver.corpus.filters.pii:Pii",
        "profanity": "piledriver.corpus.filters.profanity:Profanity",
        "quality": "piledriver.corpus.filters.quality:Quality",
    },
)
