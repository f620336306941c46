"""What a filter says of a document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from piledriver.corpus.document import Document


@dataclass(frozen=True)
class Drop:
    """Not this document. `reason` is a short stable phrase to count by; `detail` has the figure that decided."""

    reason: str
    detail: str = ""


class Filter(Protocol):
    """A frozen dataclass whose fields are the settings and which judges one document at a time."""

    def __call__(self, document: Document) -> Document | Drop:
        """The document, as it was or mended, or the reason to drop it."""
