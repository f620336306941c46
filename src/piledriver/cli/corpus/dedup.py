"""`piledriver corpus dedup IN... -o DIR`: remove duplicates from existing shards."""

from __future__ import annotations

import argparse
import dataclasses
import json

from piledriver.cli.options.counts import add_workers

EXAMPLE = "piledriver corpus dedup shards -o deduplicated --method minhash --set threshold=0.8"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("inputs", nargs="+", metavar="IN", help="shards or folders of shards")
    parser.add_argument("-o", "--out", required=True, metavar="DIR", help="corpus folder to write, or to resume")
    parser.add_argument(
        "--method",
        choices=("exact", "near", "minhash", "paragraphs", "substring"),
        default="minhash",
        help="equal documents, near duplicates (minhash or near, the default), or repeated paragraphs or substrings",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="key=value",
        help="setting of the method, repeatable; 'piledriver corpus filters' lists them",
    )
    add_workers(parser)
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def run(args: argparse.Namespace) -> None:
    """Deduplicate, and print the counts before and after."""
    from piledriver.core.config.yaml_tree import parse_override
    from piledriver.corpus.pipeline.deduplicate import deduplicate

    settings = dict(map(parse_override, args.set))
    method = "near" if args.method == "minhash" else args.method
    manifest = deduplicate(args.inputs, args.out, method, settings, workers=args.workers)
    if args.json:
        print(json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False))
        return
    before, after = (stage["sources"]["shards"] for stage in manifest.stages)
    print(f"{before['documents']} documents in, {after['documents']} out")
    for kind in ("dropped", "removed"):
        for name, count in after.get(kind, {}).items():
            print(f"{kind} {name}: {count}" if kind == "removed" else f"dropped {count}: {name}")
