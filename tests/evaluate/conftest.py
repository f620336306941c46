"""A tokenizer and a small model with opinions, shared by the tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piledriver.corpus import Document
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.models import ModelConfig, Transformer

DOCUMENTS = [
    Document("The quick brown fox jumps over the lazy dog. " * 4, source="A"),
    Document("naïve café, 東京 and 🙂", source="B"),
    Document("", source="B"),
    Document("x", source="A"),
    Document("def f(x):\n    return x + 1\n" * 10, source="Github"),
]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([document.text for document in DOCUMENTS], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return open_tokenizer(tokenizer_file)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Transformer:
    torch.manual_seed(0)
    made = Transformer(
        ModelConfig(vocab_size=tokenizer.vocab_size, dim=32, layers=2, heads=2, max_positions=16, init_std=0.3)
    )
    return made.eval()
