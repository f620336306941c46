"""`piledriver corpus show PATH`: print documents, or with --dropped the documents that a build left out."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice

from piledriver.cli.counts import positive, zero_or_more
from piledriver.core.errors import UnknownNameError, UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("path", metavar="PATH", help="a shard or a folder of shards; with --dropped a corpus")
    parser.add_argument(
        "--source", metavar="SOURCE", help="only documents of this source: a slug, or the name in the shards"
    )
    parser.add_argument("--limit", type=positive, default=5, metavar="N", help="how many documents (default 5)")
    parser.add_argument("--start", type=zero_or_more, default=0, metavar="N", help="begin at this document (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--dropped", action="store_true", help="what a build dropped, from the ledger of its corpus")
    parser.add_argument("--stage", help="with --dropped: only what this stage or filter dropped")
    parser.add_argument("--reason", help="with --dropped: only reasons that contain this")


def run(args: argparse.Namespace) -> None:
    """Print the documents, each under a line that says what it is."""
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
            f"no document of source {args.source!r} in {args.path} from document {args.start} on",
            fix=f"'piledriver corpus stats {args.path}' lists its sources",
        )
    if nothing:
        print(f"{args.path} has no document from document {args.start} on", file=sys.stderr)


def _run_dropped(args: argparse.Namespace) -> None:
    """One line for each document that was dropped: id, source, stage, reason, and which was kept in its place."""
    from piledriver.corpus.pipeline.ledger_reader import read_ledger

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
        print(f"nothing that was dropped fits (stages that dropped something: {stages})", file=sys.stderr)


def _source_name(text: str | None) -> str | None:
    """The name that documents carry; a recipe may give a source a name of its own, which stands for itself."""
    from piledriver.corpus.sources import resolve

    try:
        return resolve(text).name if text else None
    except UnknownNameError:
        return text
