"""`piledriver corpus verify DIR`: every checksum and count again, and whether the splits are apart."""

from __future__ import annotations

import argparse
from itertools import islice

from piledriver.cli.counts import add_workers

_MOST_SHOWN = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("folder", metavar="DIR", help="a corpus that 'piledriver corpus build' or 'dedup' made")
    parser.add_argument(
        "--splits", action="store_true", help="also compare all documents: no exact or near duplicate in two splits"
    )
    add_workers(parser)


def run(args: argparse.Namespace) -> int:
    """Print the differences; 0 only where there are none."""
    from piledriver.corpus.pipeline.manifest import load_manifest, verify

    differences = verify(args.folder)
    if args.splits and not differences:
        from piledriver.corpus.pipeline.split_leakage import crossings

        found = crossings(args.folder, workers=args.workers)
        differences = list(islice(found, _MOST_SHOWN))
        more = sum(1 for _ in found)
        differences += [f"and {more} more"] if more else []
        if not differences:
            print(f"{args.folder}: no exact or near duplicate crosses the splits")
    for difference in differences:
        print(difference)
    if not differences:
        print(f"{args.folder}: {len(load_manifest(args.folder).outputs)} files are as the manifest says")
    return 1 if differences else 0
