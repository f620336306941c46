"""`piledriver corpus verify DIR`: re-check checksums and counts; with --splits also leakage between the splits."""

from __future__ import annotations

import argparse
from itertools import islice

from piledriver.cli.options.counts import add_workers

_MOST_SHOWN = 20
EXAMPLE = "piledriver corpus verify corpus --splits"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("folder", metavar="DIR", help="a corpus folder written by 'piledriver corpus build' or 'dedup'")
    parser.add_argument(
        "--splits", action="store_true", help="also check that no exact or near duplicate is in two splits"
    )
    add_workers(parser)


def run(args: argparse.Namespace) -> int:
    """Print the differences; return 0 only if there are none."""
    from piledriver.corpus.pipeline.manifest import load_manifest, verify_corpus

    differences = verify_corpus(args.folder)
    if args.splits and not differences:
        from piledriver.corpus.pipeline.split_leakage import find_split_leakage

        found = find_split_leakage(args.folder, workers=args.workers)
        differences = list(islice(found, _MOST_SHOWN))
        more = sum(1 for _ in found)
        differences += [f"and {more} more"] if more else []
        if not differences:
            print(f"{args.folder}: no exact or near duplicate is in two splits")
    for difference in differences:
        print(difference)
    if not differences:
        print(f"{args.folder}: {len(load_manifest(args.folder).outputs)} files match the manifest")
    return 1 if differences else 0
