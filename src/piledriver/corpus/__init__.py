"""Floor 1: raw sources to attributed, clean, deduplicated, mixed shards of text. Never imports torch."""

from piledriver.corpus.document import Document, Refusal, make_document
from piledriver.corpus.shards.reader import Part, count_documents, read_shards, read_texts
from piledriver.corpus.shards.writer import ShardFileWriter, ShardSummary, ShardWriter

__all__ = [
    "Document",
    "Part",
    "Refusal",
    "ShardFileWriter",
    "ShardSummary",
    "ShardWriter",
    "count_documents",
    "make_document",
    "read_shards",
    "read_texts",
]
