"""Libraries that turn text into ids, from the fastest to the reference, and the check that decides which is used.

A fast library is trusted only after its ids were compared with the reference's on texts that are made to differ: every
script and symbol class, odd white space, numbers, code, long runs, joined and broken sequences. Special tokens are
never looked for in text: a document that quotes `<|endoftext|>` must not end there.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.core.errors import MissingDependencyError
from piledriver.core.random import Stream

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]
EncodeBatch = Callable[[list[str]], tuple[Ids, Offsets]]
"""Texts to all ids one after the other, and where each text's ids begin (with one last entry for the end)."""


def fastest(reference: EncodeBatch, candidates: dict[str, Callable[[], EncodeBatch]]) -> tuple[str, EncodeBatch]:
    """The first candidate that is installed, loads the tokenizer and agrees with the reference on the probes."""
    texts = probes()
    expected = reference(texts)
    for name, load in candidates.items():
        try:
            encode = load()
            found = encode(texts)
        except (ImportError, ValueError, TypeError, RuntimeError, OSError, KeyError, NotImplementedError):
            # Not installed, or a tokenizer of a kind that it does not know: the next one may.
            continue
        if agree(expected, found):
            return name, encode
    return "reference", reference


def agree(a: tuple[Ids, Offsets], b: tuple[Ids, Offsets]) -> bool:
    """Whether two encodings of the same texts are equal."""
    return np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])


def hugging_face(ordinary_json: str) -> EncodeBatch:
    """The reference for `tokenizer.json`: Hugging Face `tokenizers`."""
    tokenizer = import_tokenizers().Tokenizer.from_str(ordinary_json)

    def encode(texts: list[str]) -> tuple[Ids, Offsets]:
        return joined([one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)])

    return encode


def gigatoken_json(ordinary_json: str) -> EncodeBatch:
    """gigatoken on a `tokenizer.json`."""
    return _gigatoken(importlib.import_module("gigatoken").Tokenizer.from_json(ordinary_json))


def gigatoken_sentencepiece(model: bytes) -> EncodeBatch:
    """gigatoken on a SentencePiece model."""
    return _gigatoken(importlib.import_module("gigatoken").Tokenizer.from_sentencepiece(model))


def gigatoken_tiktoken(path: str, scheme: str) -> EncodeBatch:
    """gigatoken on a file of tiktoken ranks."""
    return _gigatoken(importlib.import_module("gigatoken").Tokenizer.from_tiktoken(path, scheme, {}))


def fastokens_json(ordinary_json: str) -> EncodeBatch:
    """fastokens on a `tokenizer.json`."""
    tokenizer = importlib.import_module("fastokens").Tokenizer.from_json_str(ordinary_json)

    def encode(texts: list[str]) -> tuple[Ids, Offsets]:
        ids, offsets = tokenizer.encode_batch_flat(texts)
        return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64).astype(np.int64)

    return encode


def _gigatoken(tokenizer: Any) -> EncodeBatch:
    def encode(texts: list[str]) -> tuple[Ids, Offsets]:
        if not texts:
            return np.empty(0, np.uint32), np.zeros(1, np.int64)
        # On the calling thread: our workers are processes, and a caller's core count is what it measures by.
        layout = tokenizer.encode_batch(texts, parallel=False).layout
        offsets = np.asarray(layout.offsets.data, dtype=np.int64)
        ids = np.asarray(layout.content.data, dtype=np.uint32)[offsets[0] : offsets[-1]]
        return ids, offsets - offsets[0]

    return encode


def joined(rows: Sequence[Sequence[int]]) -> tuple[Ids, Offsets]:
    """Lists of ids, one after the other."""
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int64)
    ids = np.fromiter((i for row in rows for i in row), dtype=np.uint32, count=int(offsets[-1]))
    return ids, offsets


def without_specials(tokenizer_json: str) -> str:
    """A `tokenizer.json` that reads special tokens as plain text and adds none: what documents are encoded with."""
    tree = json.loads(tokenizer_json)
    tree["added_tokens"] = [token for token in tree.get("added_tokens") or [] if not token.get("special")]
    tree.update(post_processor=None, truncation=None, padding=None)
    return json.dumps(tree, ensure_ascii=False)


def import_tokenizers() -> Any:
    """Hugging Face's library, or an error that says how to get it."""
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise MissingDependencyError("tokenizers", extra="data", purpose="reading a tokenizer.json") from None


def probes() -> list[str]:
    """Texts that tell tokenizers apart, the same in every process."""
    fixed = [
        "",
        " ",
        "\n",
        "Hello world",
        " leading and trailing ",
        "tabs\tand\r\nline ends\n\n\n  indented\n\tmore",
        "I'm you're we've he'll they'd IT'S o'clock rock'n'roll ''quoted''",
        "1 12 123 1234 12345 3.14159 1,000,000 0x1F 1e-9 ½ ² ٣٤٥ 一二三",
        "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # comment\n\n\nclass A:\n\tpass\n",
        "https://example.org/a_b-c?d=e&f=%20#g user@example.org C:\\path\\to\\file.txt",
        "<|endoftext|> <s> </s> [PAD] <unk> <|im_start|>",
        "Ünïcödé naïve café Straße ŁÓDŹ İstanbul ǅ ﬁ ﬀ",
        "Привет, мир! Γειά σου Κόσμε שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก 你好，世界 こんにちは 안녕하세요",
        "e\u0301 vs é, a\u0308\u0323, z\u0335\u0336, क्षि, กำ, \u200d\u200c\u200b\ufeff\u00ad",
        "👍🏽👩‍👩‍👧‍👦🇩🇪🏴󠁧󠁢󠁥󠁮󠁧󠁿 ™®© ←→ ∑∫√ ≤≥ £€¥ “”‘’–—… ¿¡",
        "\u00a0nbsp\u2003em\u3000ideographic\u2028line\u2029paragraph\x0b\x0c\x1c\x85next",
        "\x00\x01\x7f\x80\x9f\ufffd\ufffe\U0010ffff\U000e0001",
        "a" * 3000,
        " " * 1000 + "x" + "\n" * 500 + "=" * 400,
        "the quick brown fox jumps over the lazy dog. " * 40,
        "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis xqzjkvbw",
    ]
    return fixed + [_scrambled(number) for number in range(40)]


def _scrambled(number: int) -> str:
    """Characters of every plane and class, pulled together at random."""
    stream = Stream(0, "tokenizer probe", number)
    blocks = [(32, 127), (9, 14), (160, 592), (880, 1424), (1424, 1920), (2304, 3072), (8192, 8304), (8352, 8960)]
    blocks += [(12288, 12544), (19968, 20480), (44032, 44544), (127744, 129536), (65024, 65136), (768, 880)]
    draws = stream.bits(np.arange(1200)).reshape(400, 3).tolist()
    characters = []
    for which, plain, offset in draws:
        low, high = blocks[which % len(blocks)] if plain % 3 else blocks[0]
        characters.append(chr(low + offset % (high - low)))
    return "".join(characters)
