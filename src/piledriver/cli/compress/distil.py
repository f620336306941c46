"""`piledriver compress distil CONFIG.yaml [key=value ...]`: train a student; run it again to resume."""

from __future__ import annotations

import argparse
import json
import math

from piledriver.cli.compress.arguments import configure

EXAMPLE = "piledriver compress distil distil.yaml distil.teacher=run/model train.model=small train.out=recovered"
KEYS = "piledriver.compress.distil.recover:DistilConfig"

__all__ = ["EXAMPLE", "KEYS", "configure", "run"]


def run(args: argparse.Namespace) -> int:
    """Train, and print a summary. Return 75 if the run was asked to stop and can be resumed."""
    from dataclasses import asdict

    from piledriver.compress.distil import DistilConfig, distil
    from piledriver.core import storage
    from piledriver.core.config import load_config
    from piledriver.runtime.world import detect_world
    from piledriver.train.stopping import STOPPED_EXIT_CODE

    config = load_config(DistilConfig, args.config, args.overrides)
    for folder in (config.distil.teacher, config.distil.teacher_logits):
        if folder is not None:
            storage.require(folder)
    summary = distil(config)
    if detect_world().is_main and args.json:
        figures = {**asdict(summary), "loss": summary.loss if math.isfinite(summary.loss) else None}
        print(json.dumps(figures, indent=2))
    elif detect_world().is_main:
        done = "finished" if summary.finished else "stopped; run the same command to resume"
        print(f"{summary.out}: {summary.steps} steps, {summary.tokens} tokens, loss {summary.loss:.4f}, {done}")
    return 0 if summary.finished else STOPPED_EXIT_CODE
