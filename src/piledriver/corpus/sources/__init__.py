"""The sources: one module each. `SOURCES["pubmed-central"]` imports only that one."""

from piledriver.core.errors import UnknownNameError
from piledriver.core.registry import Registry
from piledriver.corpus.sources.base import Source
from piledriver.corpus.sources.table import BUILT_IN, PILE_SET_NAMES

SOURCES: Registry[Source] = Registry("source", BUILT_IN)


def resolve(name: str) -> Source:
    """A source by its slug or by its `pile_set_name`."""
    slug = PILE_SET_NAMES.get(name, name)
    if slug not in SOURCES:
        raise UnknownNameError("source", name, [*SOURCES, *PILE_SET_NAMES])
    return SOURCES[slug]


__all__ = ["SOURCES", "resolve"]
