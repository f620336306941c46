"""`piledriver tokenize CORPUS --tokenizer T -o TOKENS`: convert text shards to token shards."""

from __future__ import annotations

import argparse
import json

from piledriver.cli.options.counts import positive, processes

EXAMPLE = "piledriver tokenize corpus/train --tokenizer tokenizer.json -o tokens --workers 8"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("corpus", metavar="CORPUS", help="a text shard or a folder of text shards")
    parser.add_argument(
        "--tokenizer", required=True, metavar="T", help="tokenizer.json, *.tiktoken, *.model, or a folder with one"
    )
    parser.add_argument("-o", "--out", required=True, metavar="TOKENS", help="folder to write")
    parser.add_argument("--workers", type=processes, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument(
        "--boundary", metavar="TOKEN", help="special token between documents (default: found by its usual names)"
    )
    parser.add_argument("--encoder", metavar="NAME", help="gigatoken, fastokens or reference (default: the fastest)")
    parser.add_argument(
        "--shard-tokens",
        type=positive,
        default=1 << 26,
        metavar="N",
        help="approximate tokens per shard (default 2^26)",
    )
    parser.add_argument("--verify", action="store_true", help="read the shards back and compare their checksums")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Tokenize, and print counts by source."""
    from piledriver.data.tokens.token_set import open_tokens
    from piledriver.data.tokens.tokenize import TokenizeConfig, tokenize_corpus

    settings = TokenizeConfig(shard_tokens=args.shard_tokens, boundary=args.boundary, encoder=args.encoder)
    tokens = tokenize_corpus(args.corpus, args.tokenizer, args.out, settings, workers=args.workers)
    if args.verify:
        open_tokens(args.out, check="all")
    facts = {
        "tokens_folder": args.out,
        "documents": tokens.documents,
        "tokens": tokens.tokens,
        "bytes": tokens.byte_count,
        "bytes_per_token": tokens.byte_count / max(1, tokens.tokens - tokens.documents),
        "shards": len(tokens.shards),
        "tokens_by_source": tokens.sources,
        "tokens_by_licence": tokens.licences,
    }
    if args.json:
        print(json.dumps(facts, ensure_ascii=False))
        return
    print(
        f"{args.out}: {tokens.documents} documents, {tokens.tokens} tokens in {len(tokens.shards)} shards, "
        f"{facts['bytes_per_token']:.2f} bytes per token"
    )
    for source, count in tokens.sources.items():
        print(f"  {count:>14}  {source or '(no source)'}")
