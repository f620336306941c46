"""`piledriver checkpoint ...`: inspect checkpoints and convert them to other formats."""

VERBS: dict[str, tuple[str, str]] = {
    "inspect": ("piledriver.cli.checkpoint.inspect", "print what a checkpoint holds and whether it is complete"),
    "merge": ("piledriver.cli.checkpoint.merge", "write one model of a checkpoint as Hugging Face safetensors shards"),
    "convert": ("piledriver.cli.checkpoint.convert", "convert a checkpoint to another format"),
}
