"""`TokenSet`: a folder of token shards, verified when it is opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, StorageError, UsageError
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.data.tokens.manifest import AGAIN, MANIFEST, read_manifest
from piledriver.data.tokens.shard import REMOVE, Check, Tokens, TokenShard

PIECE_BYTES = "piece_bytes.npy"


class TokenizerMismatchError(UsageError):
    """The tokenizer or the model's vocabulary does not match the shards."""


@dataclass(frozen=True)
class DocumentPlace:
    """A document of a token set, from its index."""

    shard: int
    row: int
    id: str
    source: str
    licence: str
    origin: str
    start: int
    """First token in the shard: the boundary token."""
    stop: int
    """Token after the last one."""
    byte_count: int


class TokenSet:
    """The shards of a folder that `piledriver tokenize` wrote."""

    def __init__(self, folder: storage.Location, manifest: dict[str, Any]) -> None:
        self.folder = os.fspath(folder)
        self.manifest = manifest
        self.vocab_size: int = manifest["vocab_size"]
        self.boundary: int = manifest["boundary"]
        self.tokens: int = manifest["tokens"]
        self.documents: int = manifest["documents"]
        self.byte_count: int = manifest["bytes"]
        self.shards = [TokenShard(self.folder, metadata, manifest["dtype"]) for metadata in manifest["shards"]]

    @property
    def fingerprint(self) -> str:
        """Checksum of the manifest, which holds that of every file."""
        return storage.sha256(storage.join(self.folder, MANIFEST))

    @property
    def sources(self) -> dict[str, int]:
        """Tokens by source."""
        return self._tokens_by("source")

    @property
    def licences(self) -> dict[str, int]:
        """Tokens by licence."""
        return self._tokens_by("licence")

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the shards, from the copy beside them."""
        return open_tokenizer(storage.join(self.folder, self.manifest["tokenizer"]["file"]))

    def has_ids_of(self, folder: storage.Location) -> bool:
        """Return whether the tokenizer in a folder gives the ids of the shards.

        Raises `NoTokenizerError` if the folder has none.
        """
        file = storage.join(folder, "tokenizer.json")
        if storage.exists(file) and storage.sha256(file) == self.manifest["tokenizer"]["sha256"]:
            return True  # large vocabularies take seconds to open
        return open_tokenizer(folder).same_ids(self.tokenizer())

    @cached_property
    def piece_bytes(self) -> npt.NDArray[np.uint32] | None:
        """Bytes of text per id; None if the tokenizer changes text."""
        path = storage.join(self.folder, PIECE_BYTES)
        if not storage.exists(path):
            return None
        try:
            lengths = np.load(path, allow_pickle=False)
            if lengths.dtype != np.uint32 or lengths.shape != (self.vocab_size,):
                raise ValueError(f"{lengths.dtype} {lengths.shape}")
        except (OSError, ValueError, EOFError) as error:
            raise CorruptFileError(f"{path} is damaged: {error}", fix=REMOVE) from error
        return cast(npt.NDArray[np.uint32], lengths)

    def place(self, shard: int, row: int) -> DocumentPlace:
        """Return a document's entry in the index."""
        here = self.shards[shard]
        at, after = here.index[row], here.index[row + 1]
        group = here.metadata["groups"][int(at["group"])]
        return DocumentPlace(
            shard=shard,
            row=row,
            id=here.names[int(at["id"]) : int(at["origin"])].tobytes().decode("utf-8"),
            source=group["source"],
            licence=group["licence"],
            origin=here.names[int(at["origin"]) : int(after["id"])].tobytes().decode("utf-8"),
            start=int(here.starts[row]),
            stop=int(here.starts[row + 1]),
            byte_count=int(after["byte"] - at["byte"]),
        )

    def find(self, document_id: str) -> list[DocumentPlace]:
        """Return every document with this id; searches the names and reads no text."""
        wanted = document_id.encode("utf-8")
        found = []
        for number, shard in enumerate(self.shards):
            blob = shard.names.tobytes()
            at = blob.find(wanted)
            while at >= 0:
                row = int(np.searchsorted(shard.index["id"][:-1], at, side="right")) - 1
                place = self.place(number, row)
                if place.id == document_id and int(shard.index["id"][row]) == at:
                    found.append(place)
                at = blob.find(wanted, at + 1)
        return found

    def document(self, shard: int, row: int) -> Tokens:
        """Return a document's ids, without its boundary token."""
        starts = self.shards[shard].starts
        return self.shards[shard].tokens[starts[row] + 1 : starts[row + 1]]

    def _tokens_by(self, key: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for shard in self.shards:
            for group in shard.metadata["groups"]:
                counts[group[key]] = counts.get(group[key], 0) + group["tokens"]
        return dict(sorted(counts.items()))


def open_tokens(
    folder: storage.Location,
    *,
    check: Check = "index",
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
) -> TokenSet:
    """Open and verify a folder of token shards.

    `check` compares the sizes of all files, with "index" also the checksums of the small ones, with "all" those of
    every file. `tokenizer` and `vocab_size` are those that the shards will be used with.
    """
    path = storage.join(folder, MANIFEST)
    if not storage.exists(path):
        raise StorageError(
            f"{os.fspath(folder)} holds no complete token shards: {MANIFEST} is missing",
            fix="run piledriver tokenize until it finishes",
        )
    tokens = TokenSet(folder, read_manifest(folder))
    _check_vocabulary(tokens, tokenizer, vocab_size)
    if check != "sizes":
        _check_tokenizer(tokens)
    for shard in tokens.shards:
        shard.check(check)
    return tokens


def _check_tokenizer(tokens: TokenSet) -> None:
    """Verify the copy of the tokenizer, which is published with models that are trained on the shards."""
    noted = tokens.manifest["tokenizer"]
    path = storage.join(tokens.folder, noted["file"])
    if not storage.exists(path):
        raise CorruptFileError(f"{path} is missing", fix=AGAIN)
    if storage.sha256(path) != noted["sha256"]:
        raise CorruptFileError(f"{path} is damaged: its checksum differs", fix=AGAIN)


def _check_vocabulary(tokens: TokenSet, tokenizer: Tokenizer | None, vocab_size: int | None) -> None:
    for shard in tokens.shards:
        largest = shard.metadata["max_token"]
        if largest >= tokens.vocab_size:
            raise CorruptFileError(
                f"shard {shard.name} holds id {largest}, but the vocabulary has {tokens.vocab_size} ids", fix=AGAIN
            )
    if tokenizer is not None and tokenizer.fingerprint != tokens.manifest["tokenizer"]["sha256"]:
        raise TokenizerMismatchError(
            f"{tokens.folder} was made with another tokenizer ({tokens.manifest['tokenizer']['sha256'][:12]}...)",
            fix=f"use {storage.join(tokens.folder, tokens.manifest['tokenizer']['file'])}, or tokenise again",
        )
    if vocab_size is not None and vocab_size < tokens.vocab_size:
        raise TokenizerMismatchError(
            f"the model has {vocab_size} ids, the shards in {tokens.folder} use {tokens.vocab_size}",
            fix=f"set the model's vocab_size to {tokens.vocab_size} or more",
        )
