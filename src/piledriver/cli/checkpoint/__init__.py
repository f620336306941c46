"""`piledriver checkpoint ...`: look into checkpoints and turn them into other formats."""

VERBS: dict[str, tuple[str, str]] = {
    "inspect": ("piledriver.cli.checkpoint.inspect", "what is in a checkpoint, and whether it is whole"),
    "merge": ("piledriver.cli.checkpoint.merge", "one model of a checkpoint as Hugging Face safetensors shards"),
    "convert": ("piledriver.cli.checkpoint.convert", "a checkpoint in another format"),
}
