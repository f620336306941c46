"""`piledriver corpus repair PATH -o OUT`: keep the documents of a damaged shard that can be read."""

from __future__ import annotations

import argparse
import dataclasses
import json

EXAMPLE = "piledriver corpus repair damaged.jsonl.zst -o repaired.jsonl.zst --rejects bad.jsonl.zst"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("path", metavar="PATH", help="a shard or a folder of shards")
    parser.add_argument(
        "-o", "--out", required=True, metavar="OUT", help="shard to write (.jsonl.zst), or a folder if PATH is one"
    )
    parser.add_argument("--rejects", metavar="FILE.jsonl.zst", help="write place and reason of what cannot be read")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")


def run(args: argparse.Namespace) -> None:
    """Repair, and print how many documents were kept and how many lines or frames were not."""
    from piledriver.corpus.shards.repair import repair_shards

    summary = repair_shards(args.path, args.out, rejects=args.rejects)
    if args.json:
        print(json.dumps(dataclasses.asdict(summary)))
    else:
        print(f"{summary.documents} documents kept, {summary.bad} lines or frames dropped -> {args.out}")
