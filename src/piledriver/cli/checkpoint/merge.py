"""`piledriver checkpoint merge`: one model of a checkpoint as Hugging Face safetensors shards."""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument(
        "checkpoint", help="a checkpoint, a run's folder of them (the latest), or any folder or file with weights"
    )
    parser.add_argument("-o", "--out", required=True, help="the folder to write")
    parser.add_argument("--model", type=int, default=0, help="which model, where there are several (default: 0)")
    parser.add_argument("--max-shard-size", default="5GB", help="such as 500MiB (default: 5GB)")
    parser.add_argument("--dtype", help="convert floating-point weights, such as bfloat16 (default: as they are)")


def run(args: argparse.Namespace) -> None:
    """Write the shards and print their names."""
    from piledriver.checkpoint.formats.merge import merge

    files = merge(args.checkpoint, args.out, model=args.model, max_shard_size=args.max_shard_size, dtype=args.dtype)
    for file in files:
        print(file)
