"""`piledriver checkpoint convert SOURCE -o OUT --to FORMAT`: convert a checkpoint to another format."""

from __future__ import annotations

import argparse

EXAMPLE = "piledriver checkpoint convert run/checkpoints -o model.pt --to torch"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "source",
        help="piledriver or Accelerate checkpoint, run folder (its latest checkpoint), DCP or Hugging Face folder, "
        "or weights file",
    )
    parser.add_argument("-o", "--out", required=True, metavar="OUT", help="folder to write; for torch a file")
    parser.add_argument(
        "--to",
        default="piledriver",
        choices=("piledriver", "safetensors", "dcp", "torch"),
        help="format to write (default piledriver)",
    )


def run(args: argparse.Namespace) -> None:
    """Convert, and print the path written."""
    from piledriver.core import storage

    storage.require(args.source)  # before torch is imported
    from piledriver.checkpoint.formats.convert import convert

    print(convert(args.source, args.out, to=args.to))
