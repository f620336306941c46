"""Keep documents in some languages. The detector is pycld2 (corpus/text/language.py); docs/corpus.md compares it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from piledriver.corpus.document import Document
from piledriver.corpus.filters import Drop
from piledriver.corpus.text.language import language_of


@dataclass(frozen=True, kw_only=True)
class Language:
    """Drop documents in other languages; record the language of the others in `meta`, unless it is there.

    >>> Language()(Document("Der schnelle braune Fuchs springt über den faulen Hund und schläft."))
    Drop(reason='language', detail='de')
    """

    keep: list[str] = field(default_factory=lambda: ["en"])
    """ISO codes; empty to keep all documents and only record their language."""
    keep_unknown: bool = False
    """Keep documents whose language cannot be detected, such as tables and very short texts."""

    def __call__(self, document: Document) -> Document | Drop:
        """Judge one document."""
        found = language_of(document.text)
        if self.keep and found not in self.keep and not (found is None and self.keep_unknown):
            return Drop("language", found or "unknown")
        if found is None or "language" in document.meta:
            return document
        return msgspec.structs.replace(document, meta={**document.meta, "language": found})
