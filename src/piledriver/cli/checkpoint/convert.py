"""`piledriver checkpoint convert`: a checkpoint in another format."""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument(
        "source",
        help="a checkpoint of ours or Accelerate's, a run's folder of them (the latest), a DCP or Hugging Face folder, "
        "a weights file",
    )
    parser.add_argument("-o", "--out", required=True, help="the folder (or file, for torch) to write")
    parser.add_argument(
        "--to",
        default="piledriver",
        metavar="FORMAT",
        help="piledriver, safetensors, dcp or torch (default: piledriver)",
    )


def run(args: argparse.Namespace) -> None:
    """Convert and print where it is."""
    from piledriver.checkpoint.formats.convert import convert

    print(convert(args.source, args.out, to=args.to))
