"""Which sources there are. The Pile's 22 in the order of the paper's table 1, then the general ones."""

# `meta.pile_set_name` as the released Pile spells it -> what users type.
PILE_SET_NAMES = {
    "Pile-CC": "pile-cc",
    "PubMed Central": "pubmed-central",
    "Books3": "books3",
    "OpenWebText2": "openwebtext2",
    "ArXiv": "arxiv",
    "Github": "github",
    "FreeLaw": "freelaw",
    "StackExchange": "stackexchange",
    "USPTO Backgrounds": "uspto-backgrounds",
    "PubMed Abstracts": "pubmed-abstracts",
    "Gutenberg (PG-19)": "gutenberg-pg-19",
    "OpenSubtitles": "opensubtitles",
    "Wikipedia (en)": "wikipedia-en",
    "DM Mathematics": "dm-mathematics",
    "Ubuntu IRC": "ubuntu-irc",
    "BookCorpus2": "bookcorpus2",
    "EuroParl": "europarl",
    "HackerNews": "hackernews",
    "YoutubeSubtitles": "youtubesubtitles",
    "PhilPapers": "philpapers",
    "NIH ExPorter": "nih-exporter",
    "Enron Emails": "enron-emails",
}
GENERAL = ("text", "jsonl", "parquet", "html", "markdown", "code", "epub", "pdf", "mail")

# Slug -> `module:attribute`; the module of a source is named after its slug.
BUILT_IN = {
    slug: f"piledriver.corpus.sources.{slug.replace('-', '_')}:SOURCE" for slug in (*PILE_SET_NAMES.values(), *GENERAL)
}
