"""`piledriver compress prune CONFIG.yaml [key=value ...]`: prune a model folder."""

from __future__ import annotations

import argparse
import json

from piledriver.cli.compress.arguments import configure

EXAMPLE = "piledriver compress prune prune.yaml pattern=2of4 method=sparsegpt"
KEYS = "piledriver.compress.folders:PruneConfig"

__all__ = ["EXAMPLE", "KEYS", "configure", "run"]


def run(args: argparse.Namespace) -> None:
    """Write the compressed folder, and print what was done."""
    from piledriver.compress.folders import PruneConfig, prune_folder
    from piledriver.core import storage
    from piledriver.core.config import load_config

    config = load_config(PruneConfig, args.config, args.overrides)
    storage.require(config.model)
    record = prune_folder(config)
    if args.json:
        print(json.dumps(record, indent=2))
        return
    if "shape" in record:
        sizes = ", ".join(f"{name} {size}" for name, size in record["shape"].items())
        print(f"{config.out}: a smaller model with {sizes}; blocks {record['kept_layers']} stay")
        return
    zeros = record["zeros"]
    mean = sum(zeros.values()) / len(zeros)
    print(f"{config.out}: {config.method}, {len(zeros)} layers, {mean:.1%} zeros, {len(record['skipped'])} skipped")
