"""Deltas of a stream concatenate to the decode of all tokens, for every kind of tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from piledriver.core.random import Stream
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.serve.text.detokenizer import make_detokenizer

TEXTS = [
    "Hello, world!  Two  spaces\n",
    "żółw 日本語 🙂👩‍👩‍👧 e\u0301",
    "\t\x00 def f(x):\n    return x",
    "мир ﷽ 👍🏽",
    " a",
]


def byte_level(folder: Path) -> Tokenizer:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    made.save(str(folder / "byte_level.json"))
    return open_tokenizer(folder / "byte_level.json")


def word_piece(folder: Path) -> Tokenizer:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.decoder = tokenizers.decoders.WordPiece()
    made.train_from_iterator(
        TEXTS * 3, tokenizers.trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"])
    )
    made.save(str(folder / "word_piece.json"))
    return open_tokenizer(folder / "word_piece.json")


def byte_fallback(folder: Path) -> Tokenizer:
    """Llama 2's kind: metaspaces and tokens of single bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    for piece in ("▁", "▁Hello", "▁world", "o", "l", "!", ",", "▁a"):
        vocabulary[piece] = len(vocabulary)
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    made.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "byte_fallback.json"))
    return open_tokenizer(folder / "byte_fallback.json")


def sentence_piece(folder: Path) -> Tokenizer:
    sentencepiece = pytest.importorskip("sentencepiece")
    text = folder / "text"
    text.write_text("\n".join(TEXTS * 20).replace("\x00", ""), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "pieces"),
        vocab_size=400,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    return open_tokenizer(folder / "pieces.model")


def tiktoken_ranks(folder: Path) -> Tokenizer:
    pytest.importorskip("tiktoken")
    import base64

    pieces = [bytes([byte]) for byte in range(256)] + [b"He", b"ll", "日".encode()[:2]]
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(pieces)]
    (folder / "own.tiktoken").write_text("\n".join(lines), encoding="utf-8")
    return open_tokenizer(folder / "own.tiktoken", pattern=r"\w+|\W+", specials={"<|endoftext|>": len(pieces)})


def unigram(folder: Path) -> Tokenizer:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    special = ["<unk>", "</s>"]
    made.train_from_iterator(
        TEXTS * 5, tokenizers.trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>")
    )
    made.save(str(folder / "unigram.json"))
    return open_tokenizer(folder / "unigram.json")


KINDS = [byte_level, word_piece, byte_fallback, sentence_piece, tiktoken_ranks, unigram]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_deltas_concatenate_to_the_whole_decode(kind: object, tmp_path: Path) -> None:
    tokenizer: Tokenizer = kind(tmp_path)  # type: ignore[operator]
    stream = Stream(0, "tokens")
    samples = [tokenizer.encode(text).tolist() for text in TEXTS]
    for at in range(60):  # random tokens: bytes that are not UTF-8, characters cut in two, doubled spaces
        samples.append((stream.bits(np.arange(30 * at, 30 * at + 1 + at % 29)) % tokenizer.vocab_size).tolist())
    samples.append([token for text in TEXTS * 8 for token in tokenizer.encode(text).tolist()])
    samples.append((stream.bits(np.arange(10**6, 10**6 + 400)) % tokenizer.vocab_size).tolist())
    special = set(tokenizer.specials.values())
    for tokens in samples:
        detokenizer = make_detokenizer(tokenizer, skip_special_tokens=True)
        deltas = [detokenizer.push([token]) for token in tokens]
        whole = tokenizer.decode([token for token in tokens if token not in special]) if tokens else ""
        assert "".join(deltas) + detokenizer.finish() == whole
        assert not any(0xD800 <= ord(character) <= 0xDFFF for delta in deltas for character in delta)


def test_special_tokens_are_shown_on_request(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    tokens = [*tokenizer.encode("a").tolist(), tokenizer.boundary()]
    shown = make_detokenizer(tokenizer, skip_special_tokens=False)
    assert shown.push(tokens) + shown.finish() == "a<|endoftext|>"
    hidden = make_detokenizer(tokenizer)
    assert hidden.push(tokens) + hidden.finish() == "a"
