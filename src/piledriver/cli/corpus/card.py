"""`piledriver corpus card DIR`: write README.md (dataset card) and card.html of a corpus."""

from __future__ import annotations

import argparse

from piledriver.cli.options.counts import zero_or_more

EXAMPLE = "piledriver corpus card corpus"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("folder", metavar="DIR", help="a corpus folder written by 'piledriver corpus build' or 'dedup'")
    parser.add_argument(
        "--read",
        type=zero_or_more,
        default=100_000,
        metavar="N",
        help="documents to read for lengths and samples (default 100,000)",
    )


def run(args: argparse.Namespace) -> None:
    """Write both files and print their paths."""
    from piledriver.core import storage
    from piledriver.corpus.card.facts import card_facts
    from piledriver.corpus.card.html import card_page
    from piledriver.corpus.card.readme import card_readme

    facts = card_facts(args.folder, read_documents=args.read)
    for name, content in (("README.md", card_readme(facts)), ("card.html", card_page(facts))):
        path = storage.join(args.folder, name)
        storage.write_text(path, content)
        print(path)
