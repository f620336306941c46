"""Which module holds which source. The Pile's 22 in the order of the paper's table 1, then the general ones."""

PILE = (
    "pile-cc",
    "pubmed-central",
    "books3",
    "openwebtext2",
    "arxiv",
    "github",
    "freelaw",
    "stackexchange",
    "uspto-backgrounds",
    "pubmed-abstracts",
    "gutenberg-pg-19",
    "opensubtitles",
    "wikipedia-en",
    "dm-mathematics",
    "ubuntu-irc",
    "bookcorpus2",
    "europarl",
    "hackernews",
    "youtubesubtitles",
    "philpapers",
    "nih-exporter",
    "enron-emails",
)
GENERAL = ("text", "jsonl", "parquet", "html", "markdown", "code", "epub", "pdf", "mail")

BUILT_IN = {slug: f"piledriver.corpus.sources.{slug.replace('-', '_')}:SOURCE" for slug in (*PILE, *GENERAL)}
