"""`piledriver corpus verify DIR`: every checksum and count again."""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("folder", metavar="DIR", help="a corpus that 'piledriver corpus build' made")


def run(args: argparse.Namespace) -> int:
    """Print the differences; 0 only where there are none."""
    from piledriver.corpus.manifest import load_manifest, verify

    differences = verify(args.folder)
    for difference in differences:
        print(difference)
    if not differences:
        print(f"{args.folder}: {len(load_manifest(args.folder).outputs)} files are as the manifest says")
    return 1 if differences else 0
