"""`open_tokenizer`: open a tokenizer file of any common format.

Formats: `tokenizer.json` (Hugging Face), a folder with one or with `vocab.json` and `merges.txt` (GPT-2), `*.tiktoken`
ranks, SentencePiece `*.model`.
"""

from __future__ import annotations

import os

from piledriver.core import storage
from piledriver.core.errors import UsageError
from piledriver.corpus.text.token_counts import gpt2_tokenizer
from piledriver.data.tokenizer.formats.sentencepiece import from_sentencepiece
from piledriver.data.tokenizer.formats.tiktoken import from_tiktoken
from piledriver.data.tokenizer.formats.tokenizer_json import from_json
from piledriver.data.tokenizer.tokenizer import Tokenizer


class NoTokenizerError(UsageError):
    """A folder holds no tokenizer of a known format. Name a file of one, or a folder that has one."""


def open_tokenizer(
    path: storage.Location,
    *,
    encoder: str | None = None,
    pattern: str | None = None,
    specials: dict[str, int] | None = None,
) -> Tokenizer:
    """Open a tokenizer with the fastest library that gives the reference's ids, or with `encoder`.

    `encoder="reference"` uses no fast library. `pattern` and `specials` are for `.tiktoken` files with other names than
    those of tiktoken's own encodings.
    """
    name = os.fspath(path)
    if not storage.is_remote(name) and os.path.isdir(name):
        return _open_folder(name, encoder)
    content = storage.read_bytes(name)
    if name.endswith(".tiktoken"):
        return from_tiktoken(name, content, encoder, pattern, specials)
    if name.endswith(".model"):
        return from_sentencepiece(name, content, encoder)
    return from_json(content, encoder=encoder, name=name)


def _open_folder(folder: str, encoder: str | None) -> Tokenizer:
    files = set(os.listdir(folder))
    if "tokenizer.json" in files:
        return open_tokenizer(storage.join(folder, "tokenizer.json"), encoder=encoder)
    if {"vocab.json", "merges.txt"} <= files:
        return from_json(gpt2_tokenizer(folder).encode("utf-8"), encoder=encoder, name=folder)
    for name in sorted(files):
        if name.endswith((".tiktoken", ".model")):
            return open_tokenizer(storage.join(folder, name), encoder=encoder)
    raise NoTokenizerError(f"no tokenizer in {folder}", fix="give a tokenizer.json, *.tiktoken or *.model file")
