"""`Tokenizer`: text to ids and back. Documents are encoded as plain text; special tokens are asked for by name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.core.errors import UnknownNameError, UsageError
from piledriver.data.tokenizer.encoders import EncodeBatch, Ids

BOUNDARY_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|eos|>", "</s>", "<eos>", "[SEP]")
"""Names of the token between documents, in order of preference."""


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """An opened tokenizer; see `open_tokenizer`."""

    content: bytes = field(repr=False)
    """Content of the file, which is saved with token shards."""
    suffix: str
    """File name suffix of the format: `.json`, `.tiktoken` or `.model`."""
    vocab_size: int
    """One more than the largest id."""
    specials: dict[str, int]
    """Special tokens by name."""
    encoder: str
    """Library that encodes: gigatoken, fastokens or reference."""
    encode_batch: EncodeBatch = field(repr=False, compare=False)
    """Texts to their concatenated ids, and the offset of each text's ids."""
    pieces: tuple[bytes, ...] | None = field(repr=False)
    """Bytes of each id; None if the tokenizer changes text, so that ids have no fixed bytes."""
    reference_decode: Any = field(repr=False, compare=False)
    """The reference library's decode function, for tokenizers without `pieces`."""

    @property
    def fingerprint(self) -> str:
        """Checksum of the file, by which token shards identify their tokenizer."""
        return hashlib.sha256(self.content).hexdigest()

    def same_ids(self, other: Tokenizer) -> bool:
        """Return whether ids mean the same text in both, though their files may be written differently."""
        return self.content == other.content or (self.pieces is not None and self.pieces == other.pieces)

    def encode(self, text: str) -> Ids:
        """Return the ids of one text; special tokens in it are plain text."""
        return self.encode_batch([text])[0]

    def decode_bytes(self, ids: npt.ArrayLike) -> bytes:
        """Return the bytes of ids: exactly those that were encoded, unless the tokenizer changes text."""
        plain = ids if isinstance(ids, list) else np.asarray(ids).tolist()
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
        """Return the text of ids; bytes that are not UTF-8 (a character cut in two) become `\ufffd`."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def special(self, name: str) -> int:
        """Return the id of a special token."""
        if name not in self.specials:
            raise UnknownNameError("special token", name, self.specials)
        return self.specials[name]

    def boundary(self, name: str | None = None) -> int:
        """Return the id of the token between documents, by name or by its usual names."""
        if name is not None:
            return self.special(name)
        for known in BOUNDARY_NAMES:
            if known in self.specials:
                return self.specials[known]
        raise UsageError(
            f"the tokenizer has none of the special tokens {', '.join(BOUNDARY_NAMES)}",
            fix=f"choose one with --boundary, from {', '.join(sorted(self.specials)) or '(it has none)'}",
        )

    def piece_lengths(self) -> npt.NDArray[np.uint32] | None:
        """Return the bytes per id, or None if the tokenizer changes text; special tokens have 0."""
        if self.pieces is None:
            return None
        lengths = np.array([len(piece) for piece in self.pieces], dtype=np.uint32)
        lengths[list(self.specials.values())] = 0
        return lengths
