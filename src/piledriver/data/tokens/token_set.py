"""`TokenSet`: a folder of token shards, checked when it is opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, StorageError, UsageError
from piledriver.data.tokenizer.tokenizer import Tokenizer, open_tokenizer
from piledriver.data.tokens.manifest import AGAIN, MANIFEST, read_manifest
from piledriver.data.tokens.shard import FILES, INDEX, Tokens

PIECE_BYTES = "piece_bytes.npy"

Check = Literal["sizes", "index", "all"]


class TokenizerMismatchError(UsageError):
    """The tokenizer, or the model's vocabulary, is not the one that the shards were made for."""


@dataclass(frozen=True)
class DocumentPlace:
    """One document of a token set, as its index knows it."""

    shard: int
    row: int
    id: str
    source: str
    licence: str
    origin: str
    start: int
    """Its first token in the shard: the boundary token."""
    stop: int
    """The token after its last one."""
    byte_count: int


class TokenShard:
    """One shard, memory-mapped."""

    def __init__(self, folder: str, note: dict[str, Any], dtype: str) -> None:
        self.folder, self.note = folder, note
        self.name: str = note["name"]
        self._dtype = np.dtype(dtype)

    @cached_property
    def tokens(self) -> Tokens:
        """The ids: a plain array over the memory map (slicing a `np.memmap` costs twice as much)."""
        return self._load("tokens", self._dtype, self.note["tokens"])

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each document begins, and the end."""
        starts = self._load("starts", np.dtype("<i8"), self.note["documents"] + 1)
        if starts[0] != 0 or starts[-1] != self.note["tokens"] or np.any(starts[1:] <= starts[:-1]):
            raise CorruptFileError(f"{self._path('starts')}: the documents are not in order", fix=_REMOVE)
        return starts

    @cached_property
    def index(self) -> npt.NDArray[np.void]:
        """A row per document and one for the end."""
        return self._load("index", INDEX, self.note["documents"] + 1)

    @cached_property
    def names(self) -> npt.NDArray[np.uint8]:
        """Ids and origins."""
        return self._load("names", np.dtype(np.uint8), int(self.index["id"][-1]))

    def check(self, how: Check) -> None:
        """Compare sizes, and checksums of the index or of everything, with the note."""
        for kind in FILES:
            path, expected = self._path(kind), self.note["files"][kind]
            if not storage.exists(path):
                raise CorruptFileError(f"{path} is missing", fix=AGAIN)
            found = storage.size(path)
            if found != expected["bytes"]:
                state = "truncated" if found < expected["bytes"] else "too long"
                raise CorruptFileError(f"{path} is {state}: {found} bytes instead of {expected['bytes']}", fix=AGAIN)
            if (how == "all" or (how == "index" and kind != "tokens")) and storage.sha256(path) != expected["sha256"]:
                raise CorruptFileError(f"{path} is damaged: its checksum differs", fix=_REMOVE)

    def _path(self, kind: str) -> str:
        return storage.join(self.folder, f"{self.name}.{kind}.npy")

    def _load(self, kind: str, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
        path = self._path(kind)
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise CorruptFileError(f"{path} cannot be read: {error}", fix=_REMOVE) from error
        if array.dtype != dtype or array.shape != (length,):
            raise CorruptFileError(f"{path} holds {array.dtype} {array.shape}, not {dtype} ({length},)", fix=_REMOVE)
        return cast(npt.NDArray[Any], array.view(np.ndarray))


_REMOVE = f"remove it and {AGAIN}"


class TokenSet:
    """All the shards of a folder that `piledriver tokenize` wrote."""

    def __init__(self, folder: storage.Location, manifest: dict[str, Any]) -> None:
        self.folder = os.fspath(folder)
        self.manifest = manifest
        self.vocab_size: int = manifest["vocab_size"]
        self.boundary: int = manifest["boundary"]
        self.tokens: int = manifest["tokens"]
        self.documents: int = manifest["documents"]
        self.byte_count: int = manifest["bytes"]
        self.shards = [TokenShard(self.folder, note, manifest["dtype"]) for note in manifest["shards"]]

    @property
    def fingerprint(self) -> str:
        """The checksum of the manifest: with it, of every file."""
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
        """The tokenizer that the shards were made with, from the copy beside them."""
        return open_tokenizer(storage.join(self.folder, self.manifest["tokenizer"]["file"]))

    @cached_property
    def piece_bytes(self) -> npt.NDArray[np.uint32] | None:
        """Bytes of text per id; None where the tokenizer changes text."""
        path = storage.join(self.folder, PIECE_BYTES)
        if not storage.exists(path):
            return None
        try:
            lengths = np.load(path, allow_pickle=False)
            if lengths.dtype != np.uint32 or lengths.shape != (self.vocab_size,):
                raise ValueError(f"{lengths.dtype} {lengths.shape}")
        except (OSError, ValueError, EOFError) as error:
            raise CorruptFileError(f"{path} is damaged: {error}", fix=_REMOVE) from error
        return cast(npt.NDArray[np.uint32], lengths)

    def place(self, shard: int, row: int) -> DocumentPlace:
        """What the index knows about a document."""
        here = self.shards[shard]
        at, after = here.index[row], here.index[row + 1]
        group = here.note["groups"][int(at["group"])]
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
        """Every document with this id: a search through the names, no text is read."""
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
        """A document's ids, without its boundary token."""
        starts = self.shards[shard].starts
        return self.shards[shard].tokens[starts[row] + 1 : starts[row + 1]]

    def _tokens_by(self, key: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for shard in self.shards:
            for group in shard.note["groups"]:
                counts[group[key]] = counts.get(group[key], 0) + group["tokens"]
        return dict(sorted(counts.items()))


def open_tokens(
    folder: storage.Location,
    *,
    check: Check = "index",
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
) -> TokenSet:
    """Open a folder of token shards, and refuse it where anything about it is wrong.

    `check`: sizes of all files; with "index" (the default) also the checksums of the small ones; with "all" of every
    token. `tokenizer` and `vocab_size` are the ones that the shards are going to be used with.
    """
    path = storage.join(folder, MANIFEST)
    if not storage.exists(path):
        raise StorageError(
            f"{os.fspath(folder)} holds no finished token shards ({MANIFEST} is missing)",
            fix="run piledriver tokenize to its end",
        )
    tokens = TokenSet(folder, read_manifest(folder))
    _check_vocabulary(tokens, tokenizer, vocab_size)
    if check != "sizes":
        _check_tokenizer(tokens)
    for shard in tokens.shards:
        shard.check(check)
    return tokens


def _check_tokenizer(tokens: TokenSet) -> None:
    """The copy beside the shards goes with every model that is trained on them."""
    noted = tokens.manifest["tokenizer"]
    path = storage.join(tokens.folder, noted["file"])
    if not storage.exists(path):
        raise CorruptFileError(f"{path} is missing", fix=AGAIN)
    if storage.sha256(path) != noted["sha256"]:
        raise CorruptFileError(f"{path} is damaged: its checksum differs", fix=AGAIN)


def _check_vocabulary(tokens: TokenSet, tokenizer: Tokenizer | None, vocab_size: int | None) -> None:
    for shard in tokens.shards:
        if shard.note["max_token"] >= tokens.vocab_size:
            raise CorruptFileError(
                f"shard {shard.name} holds id {shard.note['max_token']}, but the vocabulary has {tokens.vocab_size}",
                fix=AGAIN,
            )
    if tokenizer is not None and tokenizer.fingerprint != tokens.manifest["tokenizer"]["sha256"]:
        raise TokenizerMismatchError(
            f"{tokens.folder} was made with another tokenizer ({tokens.manifest['tokenizer']['sha256'][:12]}...)",
            fix=f"use {storage.join(tokens.folder, tokens.manifest['tokenizer']['file'])}, or tokenise again",
        )
    if vocab_size is not None and vocab_size < tokens.vocab_size:
        raise TokenizerMismatchError(
            f"the model has {vocab_size} ids, the shards in {tokens.folder} use {tokens.vocab_size}",
            fix=f"set the model's vocabulary to {tokens.vocab_size} or more",
        )
