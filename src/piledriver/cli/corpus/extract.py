"""`piledriver corpus extract SOURCE PATH... -o OUT.jsonl.zst`: extract documents from raw files of one source."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict

from piledriver.cli.options.counts import add_workers
from piledriver.core.errors import UsageError

EXAMPLE = "piledriver corpus extract text README.md docs -o text.jsonl.zst"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("source", metavar="SOURCE", help="a slug or pile_set_name, see 'piledriver corpus sources'")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="raw files, folders and archives")
    parser.add_argument("-o", "--out", required=True, metavar="OUT.jsonl.zst", help="text shard to write")
    parser.add_argument("--rejects", metavar="FILE.jsonl.zst", help="write the rejected records with reason and origin")
    add_workers(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> None:
    """Extract, and print how many documents were accepted, rejected and skipped."""
    from piledriver.corpus.extraction import describe_skipped, extract
    from piledriver.corpus.sources import resolve

    slug = resolve(args.source).slug
    _check_apart(args.out, args.rejects, args.paths)
    summary = extract(slug, args.paths, args.out, rejects=args.rejects, workers=args.workers)
    if args.json:
        print(json.dumps(asdict(summary), indent=2, ensure_ascii=False))
        return
    print(f"{summary.documents} documents, {summary.text_bytes} bytes of text -> {summary.out}")
    for title, counts in (("licences", summary.licences), ("rejected", summary.refused)):
        if counts:
            print(f"{title}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    if summary.passed_over:
        print(f"skipped by name: {describe_skipped(summary.passed_over, summary.skipped_files)}")
        print("  a skipped file may hold data of this source: give it by its path to read it")


def _check_apart(out: str, rejects: str | None, paths: list[str]) -> None:
    """Reject an output path that is also an input path, or the same for documents and rejects."""
    for written in (out, rejects):
        if written is not None and os.path.realpath(written) in map(os.path.realpath, paths):
            raise UsageError(f"{written} is both input and output", fix="write to another file")
    if rejects is not None and os.path.realpath(out) == os.path.realpath(rejects):
        raise UsageError(f"documents and rejects would both be written to {out}", fix="give --rejects another file")
