from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from piledriver.core import storage
from piledriver.core.random import Stream

if TYPE_CHECKING:
    from piledriver.corpus import Document

# A machine with torch alone (a GPU image) skips what needs a corpus, and runs the rest.

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "rained",
    "in",
    "Łódź",
    "and",
    "猫",
    "x",
    "=",
    "f(y)",
    "3.14",
    "naïve\n",
]


def make_documents(count: int, seed: int = 0) -> list[Document]:
    pytest.importorskip("msgspec")
    pytest.importorskip("zstandard")
    from piledriver.corpus import Document

    stream = Stream(seed, "test corpus")
    documents = []
    for number in range(count):
        words = 1 + stream.below(120, 2 * number)
        text = " ".join(WORDS[stream.child(number).below(len(WORDS), i)] for i in range(words))
        source = ("books", "code", "talk")[stream.below(3, 2 * number + 1)]
        licence = ("CC0", "MIT")[number % 2]
        meta = {"licence": licence, "origin": f"{source}/{number}.txt"}
        documents.append(Document(text, f"doc-{seed}-{number}", source, meta))
    return documents


def _write_corpus(folder: Path, documents: list[Document], files: int = 3) -> Path:
    from piledriver.corpus import ShardFileWriter

    for number in range(files):
        with ShardFileWriter(folder / f"{number:05d}.jsonl.zst") as writer:
            for document in documents[number::files]:
                writer.write(document)
    return folder


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    return make_documents(120)


@pytest.fixture(scope="session")
def write_corpus():
    return _write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, documents) -> Path:
    return _write_corpus(tmp_path_factory.mktemp("corpus"), documents)


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory, corpus) -> Path:
    from piledriver.data.tokenizer.training import TokenizerTraining, train_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    storage.write_bytes(path, train_tokenizer(corpus, TokenizerTraining(vocab_size=320)).content)
    return path


@pytest.fixture(scope="session")
def tokens_folder(tmp_path_factory, corpus, tokenizer_path) -> Path:
    from piledriver.data.tokens.tokenize import TokenizeConfig, tokenize_corpus

    folder = tmp_path_factory.mktemp("tokens") / "tokens"
    tokenize_corpus(corpus, tokenizer_path, folder, TokenizeConfig(shard_tokens=2000))
    return folder
