"""`piledriver corpus classifier --good A --bad B -o FILE`: train the quality filter's model and judge it."""

from __future__ import annotations

import argparse
import json

from piledriver.cli.counts import positive

_HELD_OUT = 10


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("--good", nargs="+", required=True, metavar="IN", help="shards of texts like those to keep")
    parser.add_argument("--bad", nargs="+", required=True, metavar="IN", help="shards of texts as they come")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="the model")
    parser.add_argument(
        "--limit", type=positive, default=200_000, metavar="N", help="texts of each kind (default 200,000)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="key=value",
        help="bits, word_ngrams, epochs, learning_rate or seed of the training; may be repeated",
    )


def run(args: argparse.Namespace) -> None:
    """Train on nine texts of ten, evaluate on the tenth, save."""
    from itertools import islice

    from piledriver.core.config import load_config
    from piledriver.corpus.filters.classifier import ClassifierSettings, evaluate, excerpt, train
    from piledriver.corpus.shards.reader import read_texts

    settings = load_config(ClassifierSettings, overrides=args.set)
    good, bad = ([excerpt(text) for text in islice(read_texts(*paths), args.limit)] for paths in (args.good, args.bad))
    shown_good, shown_bad = ([text for i, text in enumerate(texts) if i % _HELD_OUT] for texts in (good, bad))
    model = train(shown_good, shown_bad, settings)
    figures = evaluate(model, good[::_HELD_OUT], bad[::_HELD_OUT])
    model.save(args.out)
    print(json.dumps({"model": args.out, **figures}))
