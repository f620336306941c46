"""`piledriver tokenizer ...`: train tokenizers."""

from __future__ import annotations

VERBS: dict[str, tuple[str, str]] = {
    "train": ("piledriver.cli.tokenizer.train", "train a byte-level BPE tokenizer on a corpus"),
}
