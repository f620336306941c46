"""Filters: each one small, each returning the document (perhaps mended) or a drop with its reason."""

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
    },
)

__all__ = ["FILTERS", "Drop", "Filter"]
