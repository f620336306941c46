"""`Tokenizer`: text to ids and back, from any of the usual files, with the fastest library that gives the right ids.

`tokenizer.json` (Hugging Face), a folder with one or with `vocab.json` and `merges.txt` (GPT-2), `*.tiktoken` ranks,
SentencePiece `*.model`. Documents are encoded as plain text; special tokens are asked for by name.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, MissingDependencyError, UnknownNameError, UsageError
from piledriver.data.tokenizer import encoders
from piledriver.data.tokenizer.encoders import EncodeBatch, Ids, Offsets

# Names that tokenizers give the token between documents, in the order in which we look for them.
BOUNDARY_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|eos|>", "</s>", "<eos>", "[SEP]")

_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# What a file of tiktoken ranks does not hold: how the encodings of those names split text, and their special tokens.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K = (
    rf"'(?i:[sdmt]|ll|ve|re)|{_LETTERS}+\p{{L}}++|\p{{N}}{{1,3}}+| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"{_LETTERS}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LETTERS}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TIKTOKEN_SCHEMES: dict[str, tuple[str, str, dict[str, int]]] = {
    "gpt2": ("gpt2", _GPT2, {"<|endoftext|>": 50256}),
    "r50k_base": ("gpt2", _GPT2, {"<|endoftext|>": 50256}),
    "cl100k_base": ("gpt4", _CL100K, {"<|endoftext|>": 100257}),
    "o200k_base": ("o200k", _O200K, {"<|endoftext|>": 199999}),
}


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer that was opened; see `open_tokenizer`."""

    content: bytes = field(repr=False)
    """The file itself: what is saved beside token shards."""
    suffix: str
    """How a file of this kind is named: `.json`, `.tiktoken` or `.model`."""
    vocab_size: int
    """One more than the largest id."""
    specials: dict[str, int]
    """Special tokens by name."""
    encoder: str
    """The library that encodes: gigatoken, fastokens, or the reference."""
    encode_batch: EncodeBatch = field(repr=False, compare=False)
    """Texts to ids, one after the other, and where each text's ids begin."""
    pieces: tuple[bytes, ...] | None = field(repr=False)
    """The bytes that each id stands for; None where the tokenizer changes text, so that no such table is true."""
    reference_decode: Any = field(repr=False, compare=False)

    @property
    def fingerprint(self) -> str:
        """The checksum of the tokenizer's file: what token shards are matched by."""
        return hashlib.sha256(self.content).hexdigest()

    def encode(self, text: str) -> Ids:
        """The ids of one text; special tokens in it are plain text."""
        return self.encode_batch([text])[0]

    def encode_many(self, texts: list[str]) -> list[Ids]:
        """The ids of each text."""
        ids, offsets = self.encode_batch(texts)
        return [ids[offsets[i] : offsets[i + 1]] for i in range(len(texts))]

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """The bytes that ids stand for: exactly what was encoded, where the tokenizer does not change text."""
        plain = np.asarray(ids).tolist()
        if self.pieces is None:
            return str(self.reference_decode(plain)).encode("utf-8")
        try:
            return b"".join([self.pieces[i] for i in plain])
        except IndexError:
            raise UsageError(
                f"id {max(plain)} is outside the vocabulary of {self.vocab_size}",
                fix="decode with the tokenizer that the ids were made with",
            ) from None

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text that ids stand for; bytes that are no UTF-8 (a character cut in two) become `\ufffd`."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def special(self, name: str) -> int:
        """The id of a special token."""
        if name not in self.specials:
            raise UnknownNameError("special token", name, self.specials)
        return self.specials[name]

    def boundary(self, name: str | None = None) -> int:
        """The id of the token that stands between documents."""
        if name is not None:
            return self.special(name)
        for known in BOUNDARY_NAMES:
            if known in self.specials:
                return self.specials[known]
        raise UsageError(
            "the tokenizer has no special token that is known to end a document",
            fix=f"name one with --boundary, from {', '.join(sorted(self.specials)) or '(it has none)'}",
        )

    def piece_lengths(self) -> npt.NDArray[np.uint32] | None:
        """Bytes per id, where that is known; special tokens are 0 bytes of text."""
        if self.pieces is None:
            return None
        lengths = np.array([len(piece) for piece in self.pieces], dtype=np.uint32)
        lengths[list(self.specials.values())] = 0
        return lengths


def open_tokenizer(
    path: storage.Location,
    *,
    encoder: str | None = None,
    pattern: str | None = None,
    specials: dict[str, int] | None = None,
) -> Tokenizer:
    """Open a tokenizer; ids of fast libraries are checked against the reference first.

    `encoder="reference"` does without fast libraries. `pattern` and `specials` are for `.tiktoken` files whose name is
    not one of those that we know the split of.
    """
    name = os.fspath(path)
    if not storage.is_remote(name) and os.path.isdir(name):
        return _open_folder(name, encoder)
    content = storage.read_bytes(name)
    if name.endswith(".tiktoken"):
        return _from_tiktoken(name, content, encoder, pattern, specials)
    if name.endswith(".model"):
        return _from_sentencepiece(name, content, encoder)
    return from_json(content, encoder=encoder, name=name)


def _open_folder(folder: str, encoder: str | None) -> Tokenizer:
    files = set(os.listdir(folder))
    if "tokenizer.json" in files:
        return open_tokenizer(storage.join(folder, "tokenizer.json"), encoder=encoder)
    if {"vocab.json", "merges.txt"} <= files:
        return from_json(_gpt2_json(Path(folder)), encoder=encoder, name=folder)
    for name in sorted(files):
        if name.endswith((".tiktoken", ".model")):
            return open_tokenizer(storage.join(folder, name), encoder=encoder)
    raise UsageError(f"no tokenizer in {folder}", fix="give a tokenizer.json, *.tiktoken or *.model file")


def from_json(content: bytes, *, encoder: str | None = None, name: str = "tokenizer.json") -> Tokenizer:
    """A tokenizer from the content of a `tokenizer.json`."""
    try:
        text = content.decode("utf-8")
        tree = json.loads(text)
        whole = encoders.import_tokenizers().Tokenizer.from_str(text)
    except MissingDependencyError:
        raise
    except Exception as error:  # the library raises plain Exception for a file that it cannot read
        raise CorruptFileError(f"{name} is not a tokenizer.json: {error}", fix="save or fetch it again") from error
    ordinary = encoders.without_specials(text)
    candidates = {
        "gigatoken": partial(encoders.gigatoken_json, ordinary),
        "fastokens": partial(encoders.fastokens_json, ordinary),
    }
    chosen, encode_batch = _choose(encoders.hugging_face(ordinary), candidates, encoder)
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


def _choose(reference: EncodeBatch, candidates: dict[str, Any], wish: str | None) -> tuple[str, EncodeBatch]:
    if wish is None:
        return encoders.fastest(reference, candidates)
    if wish == "reference":
        return wish, reference
    if wish not in candidates:
        raise UnknownNameError("encoder", wish, [*candidates, "reference"])
    chosen, encode = encoders.fastest(reference, {wish: candidates[wish]})
    if chosen != wish:
        raise UsageError(
            f"{wish} does not give this tokenizer's ids, or is not installed", fix="leave the choice to us"
        )
    return chosen, encode


def _byte_level_pieces(
    tree: dict[str, Any], vocabulary: dict[str, int], added: dict[str, int], size: int
) -> tuple[bytes, ...] | None:
    """The bytes of every id of a byte-level BPE; None for a tokenizer that normalises text or adds white space."""
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
    """The printable character that byte-level BPE writes for each byte: itself, or one from 256 on.

    >>> byte_characters()[ord("A")], byte_characters()[ord(" ")]
    ('A', 'Ġ')
    """
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256)]


def _gpt2_json(folder: Path) -> bytes:
    """The `tokenizer.json` of GPT-2's two files."""
    library = encoders.import_tokenizers()
    try:
        model = library.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises nothing more special
        raise CorruptFileError(
            f"{folder}: vocab.json or merges.txt is damaged: {error}", fix="fetch them again"
        ) from error
    made = library.Tokenizer(model)
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    made.add_special_tokens([name for name in BOUNDARY_NAMES[:1] if made.token_to_id(name) is not None])
    return str(made.to_str()).encode("utf-8")


def _from_tiktoken(
    name: str, content: bytes, encoder: str | None, pattern: str | None, specials: dict[str, int] | None
) -> Tokenizer:
    ranks = _read_ranks(name, content)
    known = TIKTOKEN_SCHEMES.get(os.path.basename(name).removesuffix(".tiktoken"))
    if pattern is None and known is None:
        raise UsageError(
            f"{name} holds ranks only, and its name does not say how text is split",
            fix=f"name it after its encoding ({', '.join(TIKTOKEN_SCHEMES)}); in Python, give it a pattern",
        )
    scheme, known_pattern, known_specials = known or ("", "", {})
    chosen_specials = known_specials if specials is None else specials
    try:
        tiktoken = importlib.import_module("tiktoken")
    except ImportError:
        raise MissingDependencyError("tiktoken", extra="data", purpose="reading tiktoken ranks") from None
    encoding = tiktoken.Encoding(
        os.path.basename(name), pat_str=pattern or known_pattern, mergeable_ranks=ranks, special_tokens=chosen_specials
    )

    def reference(texts: list[str]) -> tuple[Ids, Offsets]:
        return encoders.joined([encoding.encode_ordinary(text) for text in texts])

    candidates = {} if pattern else {"gigatoken": partial(encoders.gigatoken_tiktoken, name, scheme)}
    chosen, encode_batch = _choose(reference, candidates, encoder)
    size = max([*ranks.values(), *chosen_specials.values()]) + 1
    pieces = [b""] * size
    for piece, number in ranks.items():
        pieces[number] = piece
    for special, number in chosen_specials.items():
        pieces[number] = special.encode("utf-8")
    return Tokenizer(
        content=content,
        suffix=".tiktoken",
        vocab_size=size,
        specials=dict(chosen_specials),
        encoder=chosen,
        encode_batch=encode_batch,
        pieces=tuple(pieces),
        reference_decode=encoding.decode,
    )


def _read_ranks(name: str, content: bytes) -> dict[bytes, int]:
    try:
        rows = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in rows}
        missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
        if missing is not None:
            raise ValueError(f"byte {missing} has no rank")
        return ranks
    except ValueError as error:
        raise CorruptFileError(f"{name} is not a file of tiktoken ranks: {error}", fix="fetch it again") from error


def _from_sentencepiece(name: str, content: bytes, encoder: str | None) -> Tokenizer:
    try:
        library = importlib.import_module("sentencepiece")
    except ImportError:
        raise MissingDependencyError("sentencepiece", extra="data", purpose="reading a SentencePiece model") from None
    try:
        if not content:
            raise RuntimeError("it is empty")
        model = library.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise CorruptFileError(f"{name} is not a SentencePiece model: {error}", fix="fetch it again") from error

    def reference(texts: list[str]) -> tuple[Ids, Offsets]:
        return encoders.joined(model.encode(texts, num_threads=1) if texts else [])

    chosen, encode_batch = _choose(
        reference, {"gigatoken": partial(encoders.gigatoken_sentencepiece, content)}, encoder
    )
    ids = [model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id()]
    return Tokenizer(
        content=content,
        suffix=".model",
        vocab_size=model.get_piece_size(),
        specials={model.id_to_piece(i): i for i in ids if i >= 0},
        encoder=chosen,
        encode_batch=encode_batch,
        pieces=None,
        reference_decode=model.decode,
    )
