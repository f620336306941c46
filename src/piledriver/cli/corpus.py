"""`piledriver corpus ...`: raw sources to a corpus. None of these verbs imports torch."""

VERBS: dict[str, tuple[str, str]] = {
    "sources": ("piledriver.cli.corpus_sources", "the 22 sources of The Pile and the general ones"),
    "extract": ("piledriver.cli.corpus_extract", "raw files of one source to documents"),
    "show": ("piledriver.cli.corpus_show", "print documents of shards"),
    "stats": ("piledriver.cli.corpus_stats", "count documents, bytes and licences by source"),
}
