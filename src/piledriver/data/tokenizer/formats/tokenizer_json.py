"""`tokenizer.json` of Hugging Face `tokenizers`."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from piledriver.core.errors import CorruptFileError, MissingDependencyError
from piledriver.data.tokenizer import encoders
from piledriver.data.tokenizer.tokenizer import BOUNDARY_NAMES, Tokenizer


def from_json(content: bytes, *, encoder: str | None = None, name: str = "tokenizer.json") -> Tokenizer:
    """Return the tokenizer of the content of a `tokenizer.json`."""
    try:
        text = content.decode("utf-8")
        tree = json.loads(text)
        whole = encoders.import_tokenizers().Tokenizer.from_str(text)
    except MissingDependencyError:
        raise
    except Exception as error:  # the library raises plain Exception for a file that it cannot read
        raise CorruptFileError(f"{name} is not a tokenizer.json: {error}", fix="save or fetch it again") from error
    ordinary = encoders.without_specials(text)
    candidates: encoders.Candidates = {
        "gigatoken": partial(encoders.gigatoken_json, ordinary),
        "fastokens": partial(encoders.fastokens_json, ordinary),
    }
    chosen, encode_batch = encoders.choose(encoders.hugging_face(ordinary), candidates, encoder)
    vocabulary: dict[str, int] = whole.get_vocab(with_added_tokens=True)
    added = {token["content"]: token["id"] for token in tree.get("added_tokens") or []}
    specials = {token["content"]: token["id"] for token in tree.get("added_tokens") or [] if token.get("special")}
    specials |= {token: vocabulary[token] for token in BOUNDARY_NAMES[:1] if token in vocabulary}
    size = max(vocabulary.values(), default=-1) + 1
    return Tokenizer(
        content=content,
        suffix=".json",
        vocab_size=size,
        specials=specials,
        encoder=chosen,
        encode_batch=encode_batch,
        pieces=_byte_level_pieces(tree, vocabulary, added, size),
        reference_decode=partial(whole.decode, skip_special_tokens=False),
    )


def _byte_level_pieces(
    tree: dict[str, Any], vocabulary: dict[str, int], added: dict[str, int], size: int
) -> tuple[bytes, ...] | None:
    """Return the bytes of every id of a byte-level BPE; None if it normalises text or adds white space."""
    if not _is_byte_level(tree):
        return None
    to_byte = {character: byte for byte, character in enumerate(byte_characters())}
    pieces = [b""] * size
    for token, number in vocabulary.items():
        if token in added:
            pieces[number] = token.encode("utf-8")
        else:
            try:
                pieces[number] = bytes([to_byte[character] for character in token])
            except KeyError:
                pieces[number] = token.encode("utf-8")
    return tuple(pieces)


def _is_byte_level(tree: dict[str, Any]) -> bool:
    def parts(node: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
        return [] if node is None else node.get(inner) or [node]

    splitters = parts(tree.get("pre_tokenizer"), "pretokenizers")
    byte_level = [part for part in splitters if part.get("type") == "ByteLevel"]
    normalizers = [part for part in parts(tree.get("normalizer"), "normalizers") if part.get("type") != "ByteLevel"]
    adds_space = any(part.get("add_prefix_space") for part in byte_level)
    return bool(byte_level) and not normalizers and not adds_space


def byte_characters() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte: itself, or one from 256 on.

    >>> byte_characters()[ord("A")], byte_characters()[ord(" ")]
    ('A', 'Ġ')
    """
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256)]
