"""`piledriver evaluate ...`: how good is a model?"""

VERBS: dict[str, tuple[str, str]] = {
    "bpb": ("piledriver.cli.evaluate.bpb", "bits per byte of a model on a corpus, by source"),
    "lm-eval": ("piledriver.cli.evaluate.lm_eval", "tasks of EleutherAI's evaluation harness"),
}
