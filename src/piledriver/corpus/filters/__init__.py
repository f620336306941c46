"""Filters: each judges one document and returns it, perhaps changed, or a `Drop` with the reason.

Another package adds a filter through the entry-point group `piledriver.filter`.
"""

from piledriver.core.registry import Registry
from piledriver.corpus.filters.verdict import Drop, Filter

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

__all__ = ["FILTERS", "Drop", "Filter"]
