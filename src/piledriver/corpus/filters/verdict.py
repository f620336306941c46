"""The interface of filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
