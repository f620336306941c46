"""`piledriver tokenizer train`: train a byte-level BPE tokenizer on a corpus."""

from __future__ import annotations

import argparse
import json

from piledriver.cli.options.counts import positive

EXAMPLE = "piledriver tokenizer train corpus/train -o tokenizer.json --vocab-size 32000"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("corpus", metavar="CORPUS", help="a text shard or a folder of text shards")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="tokenizer.json to write")
    parser.add_argument(
        "--vocab-size",
        type=positive,
        required=True,
        metavar="N",
        help="number of ids, including the 256 bytes and the special tokens",
    )
    parser.add_argument(
        "--special",
        action="append",
        metavar="TOKEN",
        help="special token, repeatable; the first separates documents (default <|endoftext|>)",
    )
    parser.add_argument(
        "--weight",
        action="append",
        default=[],
        metavar="SOURCE=W",
        help="weight of a source in the sample, repeatable (default 1)",
    )
    parser.add_argument(
        "--sample-bytes", type=_bytes, default=500_000_000, metavar="N", help="bytes of text to train on (default 5e8)"
    )
    parser.add_argument(
        "--min-frequency",
        type=positive,
        default=2,
        metavar="N",
        help="smallest count of a pair that is merged (default 2)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sample (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Train, save, and print the size."""
    from piledriver.core import storage
    from piledriver.data.tokenizer.training import TokenizerTraining, train_tokenizer

    training = TokenizerTraining(
        vocab_size=args.vocab_size,
        special_tokens=tuple(args.special or ("<|endoftext|>",)),
        weights=dict(_weight(text) for text in args.weight),
        sample_bytes=args.sample_bytes,
        min_frequency=args.min_frequency,
        seed=args.seed,
    )
    tokenizer = train_tokenizer(args.corpus, training)
    storage.write_bytes(args.out, tokenizer.content)
    facts = {"tokenizer": args.out, "vocab_size": tokenizer.vocab_size, "sha256": tokenizer.fingerprint}
    if args.json:
        print(json.dumps(facts))
        return
    short = (
        f" ({args.vocab_size} requested: the sample has no more pairs)"
        if tokenizer.vocab_size < args.vocab_size
        else ""
    )
    print(f"{args.out}: {tokenizer.vocab_size} ids{short}, encoder {tokenizer.encoder}")


def _bytes(text: str) -> int:
    try:
        count = int(float(text))
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 5e8")
    return count


def _weight(text: str) -> tuple[str, float]:
    from piledriver.core.errors import UsageError

    source, equals, weight = text.rpartition("=")
    try:
        if not equals:
            raise ValueError
        return source, float(weight)
    except ValueError:
        raise UsageError(f"{text!r} is not a weight", fix="write SOURCE=W, for example books=2") from None
