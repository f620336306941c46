"""`piledriver checkpoint ...`: look into checkpoints and turn them into other formats."""

VERBS: dict[str, tuple[str, str]] = {
    "inspect": ("piledriver.cli.checkpoint_inspect", "what is in a checkpoint, and whether it is whole"),
    "merge": ("piledriver.cli.checkpoint_merge", "one model of a checkpoint as Hugging Face safetensors shards"),
    "convert": ("piledriver.cli.checkpoint_convert", "a checkpoint in another format"),
}
