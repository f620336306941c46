"""`piledriver corpus ...`: raw sources to a corpus. None of these verbs imports torch."""

VERBS: dict[str, tuple[str, str]] = {
    "sources": ("piledriver.cli.corpus.sources", "the 22 sources of The Pile and the general ones"),
    "extract": ("piledriver.cli.corpus.extract", "raw files of one source to documents"),
    "build": ("piledriver.cli.corpus.build", "a recipe to a filtered, deduplicated, mixed corpus"),
    "dedup": ("piledriver.cli.corpus.dedup", "duplicates out of shards that exist already"),
    "classifier": ("piledriver.cli.corpus.classifier", "train the model of the quality filter"),
    "verify": ("piledriver.cli.corpus.verify", "every checksum and count of a corpus again"),
    "card": ("piledriver.cli.corpus.card", "README.md and card.html of a corpus"),
    "show": ("piledriver.cli.corpus.show", "print documents of shards"),
    "stats": ("piledriver.cli.corpus.stats", "count documents, bytes and licences by source"),
}
