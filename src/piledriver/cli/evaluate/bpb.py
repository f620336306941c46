"""`piledriver evaluate bpb --model MODEL --corpus CORPUS`: measure bits per byte by source."""

from __future__ import annotations

import argparse
import json
from typing import Any

from piledriver.cli.options.counts import positive

EXAMPLE = "piledriver evaluate bpb --model run/model --corpus corpus/test --chart bpb.png"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "--model", required=True, help="model folder with config.json and safetensors, of piledriver or transformers"
    )
    parser.add_argument("--corpus", required=True, help="a text shard or a folder of text shards")
    parser.add_argument("--tokenizer", help="tokenizer file or folder (default: the one in the model folder)")
    parser.add_argument("--length", type=positive, metavar="N", help="tokens per window (default: the model's longest)")
    parser.add_argument(
        "--context",
        type=positive,
        default=1,
        metavar="N",
        help="tokens of context before later windows (default 1)",
    )
    parser.add_argument(
        "--boundary", metavar="NAME", help="special token between documents (default: found by its usual names)"
    )
    parser.add_argument(
        "--batch-tokens", type=positive, default=8192, metavar="N", help="tokens per forward pass (default 8192)"
    )
    parser.add_argument(
        "--layout",
        nargs="+",
        metavar="KEY=VALUE",
        help="shard the model over the ranks of `piledriver launch`, as in train: zero=3 tp=2, or a YAML file",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N documents")
    parser.add_argument("--chart", metavar="FILE.png", help="write a bar chart")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Score the documents, and print the figures. Ranks of `piledriver launch` share the documents."""
    import os
    from itertools import chain, islice

    from piledriver.core import storage
    from piledriver.core.errors import UsageError

    storage.require(args.model)  # before torch is imported
    storage.require(args.corpus)
    from piledriver.core.progress import track
    from piledriver.corpus import read_shards
    from piledriver.evaluate import bits_per_byte, open_scorer, summarise
    from piledriver.evaluate.open_model import open_model_tokenizer
    from piledriver.evaluate.report import as_json, as_text, save_chart
    from piledriver.runtime import connect, detect_world, disconnect

    if args.chart is not None and os.path.isdir(args.chart):
        raise UsageError(f"--chart: {args.chart} is a folder", fix="name a file, such as bpb.png")
    rest = islice(read_shards(args.corpus), args.limit)
    first = next(rest, None)
    if first is None:
        raise UsageError(f"{args.corpus} holds no documents", fix="give a shard or a folder of shards of text")
    documents = chain([first], rest)
    world = detect_world()
    # A named tokenizer opens fast, so it fails before the model is read.
    named = None if args.tokenizer is None else open_model_tokenizer(args.model, args.tokenizer)
    connect(world)
    scorer = open_scorer(args.model, length=args.length, device=world.device, layout=_layout(args.layout))
    tokenizer = named or open_model_tokenizer(args.model, None)
    shown = track(documents, "score", unit="documents") if world.is_main else documents
    scores = bits_per_byte(
        scorer,
        tokenizer,
        shown,
        context=args.context,
        batch_tokens=args.batch_tokens,
        boundary=args.boundary,
        world=world,
    )
    disconnect()
    if not world.is_main:
        return
    figures = summarise(scores)
    about = {"model": args.model, "corpus": args.corpus, "length": scorer.length, "context": args.context}
    print(json.dumps(as_json(figures, **about), indent=2) if args.json else as_text(figures), flush=True)
    if args.chart:
        save_chart(figures, args.chart)  # after the figures are printed, which may have taken hours


def _layout(words: list[str] | None) -> Any:
    """Return the layout of the words after `--layout`: a YAML file, keys with values, or both."""
    if words is None:
        return None
    from piledriver.core.config import load_config
    from piledriver.core.errors import UsageError
    from piledriver.engine import Layout

    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise UsageError(f"--layout names two files, {files[0]} and {files[1]}", fix="give one, then KEY=VALUE")
    return load_config(Layout, files[0] if files else None, [word for word in words if "=" in word])
