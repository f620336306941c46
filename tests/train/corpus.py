"""A small corpus for the tests of the loop: sentences of a few hundred words, and poison where asked."""

from __future__ import annotations

import random
from pathlib import Path

from piledriver.corpus import ShardFileWriter, make_document
from piledriver.data import TokenizerTraining, tokenize_corpus, train_tokenizer

POISON = "POISON"


def make_tokens(folder: Path, *, documents: int = 150, poison: int = 0) -> Path:
    """Token shards of random sentences; `poison` documents hold characters that are nowhere else."""
    luck = random.Random(0)
    words = ["".join(luck.choices("abcdefgh", k=luck.randint(2, 6))) for _ in range(300)]
    clean = folder / "clean.jsonl.zst"
    shard_path = folder / "00000.jsonl.zst"
    texts = [" ".join(luck.choices(words, k=luck.randint(5, 120))) for _ in range(documents)]
    with ShardFileWriter(clean) as shard:
        for number, text in enumerate(texts):
            shard.write(make_document(text, source="AB"[number % 2], origin=str(number), licence="CC0-1.0"))
    with ShardFileWriter(shard_path) as shard:
        for number, text in enumerate(texts):
            shard.write(make_document(text, source="AB"[number % 2], origin=str(number), licence="CC0-1.0"))
            if poison and number % (documents // poison) == documents // poison // 2:
                garbage = "".join(chr(luck.randint(0x4E00, 0x9FFF)) for _ in range(60))
                shard.write(make_document(garbage, source=POISON, origin=f"poison {number}", licence="CC0-1.0"))
    tokenizer = train_tokenizer(clean, TokenizerTraining(vocab_size=400))
    (folder / "tokenizer.json").write_bytes(tokenizer.content)
    tokenize_corpus(shard_path, folder / "tokenizer.json", folder / "tokens")
    return folder / "tokens"
