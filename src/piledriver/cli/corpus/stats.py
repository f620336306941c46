"""`piledriver corpus stats PATH`: count documents, bytes and licences by source."""

from __future__ import annotations

import argparse
import json

from piledriver.core.errors import PiledriverError

EXAMPLE = "piledriver corpus stats corpus --json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("path", metavar="PATH", help="a shard or a folder of shards")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Count and print."""
    from piledriver.corpus.card.facts import count_sources

    counts = count_sources(args.path)
    if not counts:
        raise PiledriverError(f"{args.path} holds no documents", fix="give a shard or a folder of shards that has some")
    if args.json:
        print(json.dumps({name: vars(counted) for name, counted in counts.items()}, indent=2, ensure_ascii=False))
        return
    width = max(len(name) for name in counts)
    print(f"{'source':<{width}}  {'documents':>10}  {'MB':>9}  {'mean KB':>8}  licences")
    for name, counted in counts.items():
        licences = ", ".join(f"{number} {licence}" for licence, number in counted.licences.most_common(3))
        megabytes, mean_kilobytes = counted.text_bytes / 1e6, counted.text_bytes / counted.documents / 1e3
        print(f"{name:<{width}}  {counted.documents:>10}  {megabytes:>9.2f}  {mean_kilobytes:>8.1f}  {licences}")
