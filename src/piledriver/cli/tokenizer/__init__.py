"""`piledriver tokenizer ...`: make tokenizers."""

from __future__ import annotations

VERBS: dict[str, tuple[str, str]] = {
    "train": ("piledriver.cli.tokenizer.train", "learn a byte-level BPE tokenizer from a corpus"),
}
