"""`piledriver checkpoint merge CHECKPOINT -o DIR`: write one model as Hugging Face safetensors shards."""

from __future__ import annotations

import argparse
import re

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
        "--like",
        metavar="FOLDER",
        help="copy config and tokenizer files from this Hugging Face folder, for a checkpoint of a transformers model; "
        "of a run of 'piledriver train' they are written anyway",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest shard, such as 500MiB (default 5GB)"
    )
    parser.add_argument(
        "--dtype",
        type=_dtype,
        metavar="DTYPE",
        help="convert floating-point weights, for example to bfloat16",
    )


def run(args: argparse.Namespace) -> None:
    """Write the shards, with config and tokenizer if they are known, and print the paths."""
    from piledriver.core import storage
    from piledriver.core.byte_size import parse_size

    storage.require(args.checkpoint)  # before torch is imported
    parse_size(args.max_shard_size)
    if args.like is not None:
        storage.require(args.like)
    from piledriver.checkpoint.formats.merge import merge
    from piledriver.models.interchange import copy_model_files
    from piledriver.train.publish import publish_checkpoint, run_of

    options = {"max_shard_size": args.max_shard_size, "dtype": args.dtype}
    run = run_of(args.checkpoint) if args.model == 0 and args.like is None else None
    files = publish_checkpoint(run, args.checkpoint, args.out, **options) if run is not None else []
    files = files or merge(args.checkpoint, args.out, model=args.model, **options)
    if args.like is not None:
        files += copy_model_files(args.like, args.out)
    for file in files:
        print(file)


def _dtype(text: str) -> str:
    if not re.fullmatch(r"b?float\d+\w*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a floating-point dtype, such as bfloat16")
    return text
