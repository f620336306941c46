"""`piledriver compress ...`: make a model smaller."""

VERBS: dict[str, tuple[str, str]] = {
    "quantise": ("piledriver.cli.compress.quantise", "store weights in 8 or 4 bits"),
    "prune": ("piledriver.cli.compress.prune", "set weights to zero, or remove whole parts"),
    "distil": ("piledriver.cli.compress.distil", "train a student against its teacher"),
    "plan": ("piledriver.cli.compress.plan", "predict size and speed before anything runs"),
    "report": ("piledriver.cli.compress.report", "compare models in size, bits per byte and speed"),
    "demo": ("piledriver.cli.compress.demo", "prune, recover, quantise and serve the demo's own model"),
}
