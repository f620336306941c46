"""`piledriver corpus ...`: build a corpus from raw sources. None of these verbs imports torch."""

VERBS: dict[str, tuple[str, str]] = {
    "sources": ("piledriver.cli.corpus.sources", "list the sources of The Pile and the general ones"),
    "filters": ("piledriver.cli.corpus.filters", "list the filters and stages of a recipe with their settings"),
    "extract": ("piledriver.cli.corpus.extract", "extract documents from raw files of one source"),
    "build": ("piledriver.cli.corpus.build", "build a filtered, deduplicated, mixed corpus from a recipe"),
    "dedup": ("piledriver.cli.corpus.dedup", "remove duplicates from existing shards"),
    "classifier": ("piledriver.cli.corpus.classifier", "train the classifier of the quality filter"),
    "verify": ("piledriver.cli.corpus.verify", "re-check every checksum and count of a corpus"),
    "repair": ("piledriver.cli.corpus.repair", "keep the readable documents of damaged shards, with their meta"),
    "card": ("piledriver.cli.corpus.card", "write README.md and card.html of a corpus"),
    "show": ("piledriver.cli.corpus.show", "print documents, or what a build dropped"),
    "stats": ("piledriver.cli.corpus.stats", "count documents, bytes and licences by source"),
}
