"""Tokenizers from every kind of file: the right ids, every byte back, no special token out of plain text."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.core.errors import CorruptFileError, UnknownNameError, UsageError
from piledriver.data.tokenizer import encoders
from piledriver.data.tokenizer.formats.tokenizer_json import byte_characters, from_json
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.data.tokenizer.training import TokenizerTraining, source_shares, train_tokenizer

GPT2 = Path(__file__).resolve().parents[3] / "../shared/tokenizers/gpt2"


def test_every_encoder_gives_the_reference_ids(tokenizer_path):
    reference = open_tokenizer(tokenizer_path, encoder="reference")
    texts = encoders.probes()
    expected = reference.encode_batch(texts)
    for name in ("gigatoken", "fastokens"):
        pytest.importorskip(name)
        assert encoders.same_encoding(open_tokenizer(tokenizer_path, encoder=name).encode_batch(texts), expected)


def test_a_library_that_gives_other_ids_is_not_used(tokenizer_path):
    ordinary = encoders.without_specials(tokenizer_path.read_text())
    reference = encoders.hugging_face(ordinary)

    def wrong():
        def encode(texts):
            ids, offsets = reference(texts)
            return np.where(ids == 300, 301, ids), offsets

        return encode

    def absent():
        raise ImportError("not there")

    assert encoders.fastest(reference, {"absent": absent, "wrong": wrong}) == ("reference", reference)
    assert encoders.fastest(reference, {"wrong": wrong, "right": lambda: reference})[0] == "right"


@given(text=st.text())
@settings(max_examples=100, deadline=None)
def test_every_byte_comes_back(text):
    tokenizer = _trained()
    encoded = text.encode("utf-8")
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == encoded
    assert int(tokenizer.piece_lengths()[ids].sum()) == len(encoded)


_cache: dict[str, object] = {}


def _trained():
    if "tokenizer" not in _cache:
        library = encoders.import_tokenizers()
        made = library.Tokenizer(library.models.BPE())
        made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = library.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator(["the cat sat on the mat " * 20], trainer)
        _cache["tokenizer"] = from_json(made.to_str().encode())
    return _cache["tokenizer"]


def test_text_that_quotes_a_special_token_makes_none(tokenizer_path):
    tokenizer = open_tokenizer(tokenizer_path)
    assert tokenizer.boundary() == tokenizer.special("<|endoftext|>")
    assert tokenizer.boundary() not in tokenizer.encode("a <|endoftext|> b")
    with pytest.raises(UnknownNameError):
        tokenizer.boundary("<|nothing|>")


def test_training_is_a_function_of_corpus_and_settings(corpus):
    training = TokenizerTraining(vocab_size=300, weights={"books": 2, "code": 1, "talk": 0}, sample_bytes=4000)
    first, second = (train_tokenizer(corpus, training) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert first.vocab_size == 300
    shares = source_shares(corpus, training)
    assert shares["talk"] == 0
    assert shares["books"] > shares["code"] > 0
    with pytest.raises(UsageError, match="no source 'poems'"):
        source_shares(corpus, TokenizerTraining(weights={"poems": 1}))


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": 3}', b"\xff\xfe", b"[]"])
def test_files_that_are_no_tokenizer(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"not a tokenizer\.json"):
        open_tokenizer(path)


def test_tiktoken_ranks(tmp_path):
    pytest.importorskip("tiktoken")
    pieces = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"12"]
    ranks = b"".join(base64.b64encode(piece) + f" {rank}\n".encode() for rank, piece in enumerate(pieces))
    named, other = tmp_path / "r50k_base.tiktoken", tmp_path / "mine.tiktoken"
    named.write_bytes(ranks)
    other.write_bytes(ranks)
    tokenizer = open_tokenizer(named)
    text = "the the 123 naïve <|endoftext|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("the the").tolist() == [257, 258]
    assert tokenizer.boundary() == 50256
    with pytest.raises(UsageError, match="holds ranks only"):
        open_tokenizer(other)
    assert open_tokenizer(other, pattern=r"\S+|\s+", specials={"</s>": 260}).boundary() == 260
    other.write_bytes(b"no ranks")
    with pytest.raises(CorruptFileError):
        open_tokenizer(other, pattern=r"\S+")


def test_the_splits_of_known_encodings_are_those_of_gigatoken(tmp_path):
    """Two independent writings of the same published splits agree on every probe."""
    pytest.importorskip("tiktoken")
    pytest.importorskip("gigatoken")
    order = [byte for byte, c in sorted(enumerate(byte_characters()), key=lambda pair: pair[1])]
    for name in ("r50k_base", "cl100k_base", "o200k_base"):
        path = tmp_path / f"{name}.tiktoken"
        pieces = [bytes([byte]) for byte in order] + [b" a", b"e ", b"\n\n", b"  ", b"12", b"'s"]
        path.write_bytes(b"".join(base64.b64encode(p) + f" {rank}\n".encode() for rank, p in enumerate(pieces)))
        assert open_tokenizer(path).encoder == "gigatoken", name


def test_sentencepiece_model(tmp_path):
    library = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text("the cat sat on the mat\nwhile it rained\n" * 50)
    library.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    tokenizer = open_tokenizer(tmp_path / "sp.model")
    assert tokenizer.decode(tokenizer.encode("the cat rained")) == "the cat rained"
    assert tokenizer.boundary() == tokenizer.special("</s>")
    assert tokenizer.piece_lengths() is None
    (tmp_path / "bad.model").write_bytes(b"nothing")
    with pytest.raises(CorruptFileError):
        open_tokenizer(tmp_path / "bad.model")


@pytest.mark.skipif(not GPT2.exists(), reason="the shared tokenizers are not here")
def test_gpt2_from_its_two_files():
    tokenizer = open_tokenizer(GPT2)
    assert (tokenizer.vocab_size, tokenizer.boundary()) == (50257, 50256)
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    assert tokenizer.decode_bytes(tokenizer.encode("naïve 猫\n")) == "naïve 猫\n".encode()


def test_a_tokenizer_that_changes_text_claims_no_bytes(tokenizer_path):
    tree = json.loads(tokenizer_path.read_text())
    tree["normalizer"] = {"type": "Lowercase"}
    assert from_json(json.dumps(tree).encode()).piece_lengths() is None
