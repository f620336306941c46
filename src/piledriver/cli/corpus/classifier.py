"""`piledriver corpus classifier --good A --bad B -o FILE`: train and evaluate the quality filter's classifier."""

from __future__ import annotations

import argparse
import json

from piledriver.cli.options.counts import positive

EXAMPLE = "piledriver corpus classifier --good wikipedia --bad crawl -o quality.model"
_HELD_OUT = 10


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "--good", nargs="+", required=True, metavar="IN", help="shards with texts of the wanted quality"
    )
    parser.add_argument("--bad", nargs="+", required=True, metavar="IN", help="shards with unfiltered texts")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="model file to write")
    parser.add_argument(
        "--limit", type=positive, default=200_000, metavar="N", help="texts of each class (default 200,000)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="key=value",
        help="bits, word_ngrams, epochs, learning_rate or seed, repeatable",
    )


def run(args: argparse.Namespace) -> None:
    """Train on nine tenths of the texts, evaluate on the rest, save, and print the figures as JSON."""
    from itertools import islice

    from piledriver.core.config import load_config
    from piledriver.corpus.filters.classifier import (
        ClassifierSettings,
        evaluate_classifier,
        excerpt,
        train_classifier,
    )
    from piledriver.corpus.shards.reader import read_texts

    settings = load_config(ClassifierSettings, overrides=args.set)
    good, bad = ([excerpt(text) for text in islice(read_texts(*paths), args.limit)] for paths in (args.good, args.bad))
    shown_good, shown_bad = ([text for i, text in enumerate(texts) if i % _HELD_OUT] for texts in (good, bad))
    model = train_classifier(shown_good, shown_bad, settings)
    figures = evaluate_classifier(model, good[::_HELD_OUT], bad[::_HELD_OUT])
    model.save(args.out)
    print(json.dumps({"model": args.out, **figures}))
