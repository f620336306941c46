"""Floor 1: raw sources to attributed, clean, deduplicated, mixed text shards. Never imports torch.

Names are imported on first use: reading shards needs none of the parsers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from piledriver.core.lazy import lazy_names

if TYPE_CHECKING:
    from piledriver.corpus.document import Document, Refusal, make_document
    from piledriver.corpus.extraction import extract
    from piledriver.corpus.filters import FILTERS
    from piledriver.corpus.pipeline.build import build_corpus
    from piledriver.corpus.pipeline.deduplicate import deduplicate
    from piledriver.corpus.pipeline.ledger import read_ledger
    from piledriver.corpus.pipeline.manifest import Manifest, load_manifest, verify_corpus
    from piledriver.corpus.pipeline.recipe import Recipe, load_recipe
    from piledriver.corpus.pipeline.stage_registry import STAGES
    from piledriver.corpus.shards.reader import Part, count_documents, read_shards, read_texts
    from piledriver.corpus.shards.writer import ShardFileWriter, ShardSummary, ShardWriter
    from piledriver.corpus.sources import SOURCES

_MODULES = {
    "document": ("Document", "Refusal", "make_document"),
    "extraction": ("extract",),
    "filters": ("FILTERS",),
    "pipeline.build": ("build_corpus",),
    "pipeline.deduplicate": ("deduplicate",),
    "pipeline.ledger": ("read_ledger",),
    "pipeline.manifest": ("Manifest", "load_manifest", "verify_corpus"),
    "pipeline.recipe": ("Recipe", "load_recipe"),
    "pipeline.stage_registry": ("STAGES",),
    "shards.reader": ("Part", "count_documents", "read_shards", "read_texts"),
    "shards.writer": ("ShardFileWriter", "ShardSummary", "ShardWriter"),
    "sources": ("SOURCES",),
}

__all__ = [
    "FILTERS",
    "SOURCES",
    "STAGES",
    "Document",
    "Manifest",
    "Part",
    "Recipe",
    "Refusal",
    "ShardFileWriter",
    "ShardSummary",
    "ShardWriter",
    "build_corpus",
    "count_documents",
    "deduplicate",
    "extract",
    "load_manifest",
    "load_recipe",
    "make_document",
    "read_ledger",
    "read_shards",
    "read_texts",
    "verify_corpus",
]

__getattr__, __dir__ = lazy_names(__name__, {name: module for module, names in _MODULES.items() for name in names})
