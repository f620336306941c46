"""`piledriver corpus show PATH`: print documents, or with --dropped the documents that a build dropped."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice

from piledriver.cli.options.counts import positive, zero_or_more
from piledriver.core.errors import UnknownNameError, UsageError

EXAMPLE = "piledriver corpus show corpus --source arxiv --limit 3"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("path", metavar="PATH", help="a shard or a folder of shards; with --dropped a corpus folder")
    parser.add_argument(
        "--source", metavar="SOURCE", help="only documents of this source: a slug, or its name in the shards"
    )
    parser.add_argument("--limit", type=positive, default=5, metavar="N", help="print at most N documents (default 5)")
    parser.add_argument(
        "--start", type=zero_or_more, default=0, metavar="N", help="skip the first N documents (default 0)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--dropped", action="store_true", help="list what the build dropped, from the ledger")
    parser.add_argument("--stage", help="with --dropped: only this stage or filter")
    parser.add_argument("--reason", help="with --dropped: only reasons that contain this text")


def run(args: argparse.Namespace) -> None:
    """Print the documents, each below a line with id, source and meta."""
    if args.dropped:
        return _run_dropped(args)
    from piledriver.corpus import read_shards
    from piledriver.corpus.document import to_line

    name = _source_name(args.source)
    chosen = (document for document in read_shards(args.path, start=args.start) if name in (None, document.source))
    nothing = True
    for document in islice(chosen, args.limit):
        nothing = False
        if args.json:
            print(to_line(document).decode().rstrip("\n"))
            continue
        print(f"--- {document.id}  {document.source}  {json.dumps(document.meta, ensure_ascii=False)}")
        print(document.text, end="\n\n")
    if nothing and args.source:
        raise UsageError(
            f"{args.path} has no document of source {args.source!r} after the first {args.start}",
            fix=f"'piledriver corpus stats {args.path}' lists its sources",
        )
    if nothing:
        print(f"{args.path} has no document after the first {args.start}", file=sys.stderr)


def _run_dropped(args: argparse.Namespace) -> None:
    """Print one line per dropped document: id, source, stage, reason, and the duplicate that was kept."""
    from piledriver.corpus.pipeline.ledger import read_ledger

    rows = read_ledger(args.path, source=_source_name(args.source), stage=args.stage, reason=args.reason)
    nothing = True
    for row in islice(rows, args.start, args.start + args.limit):
        nothing = False
        if args.json:
            print(json.dumps(row, ensure_ascii=False))
            continue
        said = f"{row['stage']}: {row['reason']}" + (f" ({row['detail']})" if row["detail"] else "")
        print(
            f"{row['id'] or row['origin']}  {row['source']}  {said}" + (f"  kept {row['kept']}" if row["kept"] else "")
        )
    if nothing:
        stages = ", ".join(sorted({row["stage"] for row in read_ledger(args.path)})) or "none"
        print(f"no dropped document matches (stages that dropped documents: {stages})", file=sys.stderr)


def _source_name(text: str | None) -> str | None:
    """Return the source name as in the shards; a name that is no slug is one that a recipe gave, and stays."""
    from piledriver.corpus.sources import resolve

    try:
        return resolve(text).name if text else None
    except UnknownNameError:
        return text
