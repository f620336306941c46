"""`piledriver evaluate ...`: measure a model."""

VERBS: dict[str, tuple[str, str]] = {
    "bpb": ("piledriver.cli.evaluate.bpb", "measure bits per byte on a corpus, by source"),
    "lm-eval": ("piledriver.cli.evaluate.lm_eval", "run tasks of EleutherAI's evaluation harness"),
}
