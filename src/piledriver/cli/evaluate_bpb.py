"""`piledriver evaluate bpb --model MODEL --corpus CORPUS`: bits per byte by source."""

from __future__ import annotations

import argparse
import json


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument(
        "--model", required=True, help="a folder with config.json and safetensors (ours or transformers')"
    )
    parser.add_argument("--corpus", required=True, help="a shard or a folder of shards of text")
    parser.add_argument("--tokenizer", help="a tokenizer file or folder (default: the one beside the model)")
    parser.add_argument("--length", type=int, metavar="N", help="tokens in a window (default: the model's longest)")
    parser.add_argument("--context", type=int, default=1, metavar="N", help="tokens of context for each later window")
    parser.add_argument("--batch-tokens", type=int, default=8192, metavar="N", help="tokens scored at once")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N documents")
    parser.add_argument("--chart", metavar="FILE.png", help="save a bar chart")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Score and print."""
    from itertools import islice

    from piledriver.core.progress import track
    from piledriver.corpus import read_shards
    from piledriver.evaluate import bits_per_byte, open_scorer, summarise
    from piledriver.evaluate.open_model import open_model_tokenizer
    from piledriver.evaluate.report import as_json, as_text, save_chart

    tokenizer = open_model_tokenizer(args.model, args.tokenizer)
    scorer = open_scorer(args.model, length=args.length)
    documents = track(islice(read_shards(args.corpus), args.limit), "score", unit="documents")
    scores = bits_per_byte(scorer, tokenizer, documents, context=args.context, batch_tokens=args.batch_tokens)
    figures = summarise(scores)
    if args.chart:
        save_chart(figures, args.chart)
    about = {"model": args.model, "corpus": args.corpus, "length": scorer.length, "context": args.context}
    print(json.dumps(as_json(figures, **about), indent=2) if args.json else as_text(figures))
