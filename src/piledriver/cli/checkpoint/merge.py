"""`piledriver checkpoint merge CHECKPOINT -o DIR`: write one model as Hugging Face safetensors shards."""

from __future__ import annotations

import argparse

EXAMPLE = "piledriver checkpoint merge run/checkpoints -o merged --dtype bfloat16"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "checkpoint", help="checkpoint, run folder (its latest checkpoint), or folder or file with weights"
    )
    parser.add_argument("-o", "--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--model",
        type=int,
        metavar="N",
        default=0,
        help="index of the model, if the checkpoint has several (default 0)",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest shard, such as 500MiB (default 5GB)"
    )
    parser.add_argument(
        "--dtype", help="convert floating-point weights to this dtype, such as bfloat16 (default: no conversion)"
    )


def run(args: argparse.Namespace) -> None:
    """Write the shards, and print their paths."""
    from piledriver.checkpoint.formats.merge import merge

    files = merge(args.checkpoint, args.out, model=args.model, max_shard_size=args.max_shard_size, dtype=args.dtype)
    for file in files:
        print(file)
