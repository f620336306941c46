"""Encoders: fast tokenizer libraries, and the check that they give the ids of the reference library.

A fast library is used only if its ids equal the reference's on the texts of `probes.py`. Special tokens are never
parsed in text: a document that quotes `<|endoftext|>` must not end there.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.core.errors import UnknownNameError, UsageError
from piledriver.core.lazy import import_optional
from piledriver.data.tokenizer.probes import probes

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]
EncodeBatch = Callable[[list[str]], tuple[Ids, Offsets]]
"""Texts to their concatenated ids, and the offset of each text's ids (with a last entry for the end)."""
Candidates = dict[str, Callable[[], EncodeBatch]]
"""Functions that load fast encoders, by name, fastest first."""


def fastest(reference: EncodeBatch, candidates: Candidates) -> tuple[str, EncodeBatch]:
    """Return the first candidate that is installed, loads the tokenizer and gives the reference's ids on the probes."""
    texts = probes()
    expected = reference(texts)
    for name, load in candidates.items():
        try:
            encode = load()
            found = encode(texts)
        except (ImportError, ValueError, TypeError, RuntimeError, OSError, KeyError, NotImplementedError):
            # Not installed, or this library does not support the tokenizer: try the next one.
            continue
        if same_encoding(expected, found):
            return name, encode
    return "reference", reference


def choose(reference: EncodeBatch, candidates: Candidates, wish: str | None) -> tuple[str, EncodeBatch]:
    """Return the encoder that was asked for by name, or the fastest exact one."""
    if wish is None:
        return fastest(reference, candidates)
    if wish == "reference":
        return wish, reference
    if wish not in candidates:
        raise UnknownNameError("encoder", wish, [*candidates, "reference"])
    chosen, encode = fastest(reference, {wish: candidates[wish]})
    if chosen != wish:
        raise UsageError(
            f"encoder {wish!r} is not installed, or gives other ids than the reference", fix="leave encoder out"
        )
    return chosen, encode


def same_encoding(a: tuple[Ids, Offsets], b: tuple[Ids, Offsets]) -> bool:
    """Return whether two encodings of the same texts are equal."""
    return np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])


def hugging_face(ordinary_json: str) -> EncodeBatch:
    """Return the reference encoder for `tokenizer.json`: Hugging Face `tokenizers`."""
    tokenizer = import_tokenizers().Tokenizer.from_str(ordinary_json)

    def encode(texts: list[str]) -> tuple[Ids, Offsets]:
        return concatenate_ids([one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)])

    return encode


def gigatoken_json(ordinary_json: str) -> EncodeBatch:
    """Return gigatoken's encoder for a `tokenizer.json`."""
    return _gigatoken(importlib.import_module("gigatoken").Tokenizer.from_json(ordinary_json))


def gigatoken_sentencepiece(model: bytes) -> EncodeBatch:
    """Return gigatoken's encoder for a SentencePiece model."""
    return _gigatoken(importlib.import_module("gigatoken").Tokenizer.from_sentencepiece(model))


def gigatoken_tiktoken(path: str, scheme: str) -> EncodeBatch:
    """Return gigatoken's encoder for a file of tiktoken ranks."""
    return _gigatoken(importlib.import_module("gigatoken").Tokenizer.from_tiktoken(path, scheme, {}))


def fastokens_json(ordinary_json: str) -> EncodeBatch:
    """Return fastokens' encoder for a `tokenizer.json`."""
    tokenizer = importlib.import_module("fastokens").Tokenizer.from_json_str(ordinary_json)

    def encode(texts: list[str]) -> tuple[Ids, Offsets]:
        ids, offsets = tokenizer.encode_batch_flat(texts)
        return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64).astype(np.int64)

    return encode


def _gigatoken(tokenizer: Any) -> EncodeBatch:
    def encode(texts: list[str]) -> tuple[Ids, Offsets]:
        if not texts:
            return np.empty(0, np.uint32), np.zeros(1, np.int64)
        # On the calling thread: our workers are processes.
        layout = tokenizer.encode_batch(texts, parallel=False).layout
        offsets = np.asarray(layout.offsets.data, dtype=np.int64)
        ids = np.asarray(layout.content.data, dtype=np.uint32)[offsets[0] : offsets[-1]]
        return ids, offsets - offsets[0]

    return encode


def concatenate_ids(rows: Sequence[Sequence[int]]) -> tuple[Ids, Offsets]:
    """Concatenate lists of ids; return them with the offset of each list."""
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int64)
    ids = np.fromiter((i for row in rows for i in row), dtype=np.uint32, count=int(offsets[-1]))
    return ids, offsets


def without_specials(tokenizer_json: str) -> str:
    """Return a `tokenizer.json` that parses no special tokens and adds none, for encoding documents."""
    tree = json.loads(tokenizer_json)
    tree["added_tokens"] = [token for token in tree.get("added_tokens") or [] if not token.get("special")]
    tree.update(post_processor=None, truncation=None, padding=None)
    return json.dumps(tree, ensure_ascii=False)


def import_tokenizers() -> Any:
    """Return the module `tokenizers`, or raise `MissingDependencyError`."""
    return import_optional("tokenizers", extra="data", purpose="reading a tokenizer.json")
