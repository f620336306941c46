"""The sources: one module each. `SOURCES["pubmed-central"]` imports only that one."""

from piledriver.core.registry import Registry
from piledriver.corpus.source import Source
from piledriver.corpus.sources.table import BUILT_IN

SOURCES: Registry[Source] = Registry("source", BUILT_IN)

__all__ = ["SOURCES"]
