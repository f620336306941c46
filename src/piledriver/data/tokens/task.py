"""One task of tokenisation: a text shard, or some of its frames, to one or more token shards.

A task skips the shards that an earlier run completed, and writes the same bytes as without an interruption.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from piledriver.core import storage
from piledriver.core.batches import batches_by_size
from piledriver.core.errors import CorruptFileError
from piledriver.core.json_file import read_json
from piledriver.corpus import Document, Part, read_shards
from piledriver.data.tokenizer.encoders import Ids, Offsets
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.data.tokens.manifest import read_shard_metadata
from piledriver.data.tokens.shard import TokenDocument, TokenShard, write_shard

_BATCH_CHARACTERS = 1 << 21


@dataclass(frozen=True)
class TokenizeTask:
    """A file, or a part of its frames, with everything that a worker needs."""

    number: int
    path: str
    part: tuple[int, int] | None
    folder: str
    tokenizer: str
    boundary: int
    dtype: str
    shard_tokens: int
    encoder: str

    @property
    def result_path(self) -> str:
        """The file that a completed task leaves."""
        return storage.join(self.folder, f"unit-{self.number:05d}.json")

    def shard_name(self, number: int) -> str:
        """Return the name of one of the task's shards."""
        return f"{self.number:05d}-{number:03d}"


def run_task(task: TokenizeTask) -> int:
    """Run a task, from where an earlier run stopped; return its number of documents."""
    done = complete_shards(task)
    taken = sum(int(shard["documents"]) for shard in done)
    if _has_result(task, {"shards": len(done), "documents": taken}):
        return taken
    part = Part(*task.part) if task.part is not None else None
    documents = islice(read_shards(task.path, part=part), taken, None)
    tokenizer = _worker_tokenizer(task.tokenizer, task.encoder, task.boundary)
    number, tokens = len(done), 0
    pending: list[TokenDocument] = []
    for batch in batches_by_size(documents, lambda document: len(document.text), _BATCH_CHARACTERS):
        taken += len(batch)
        # Shards are cut at documents, never at batches: a resumed task has other batches and the same shards.
        for document in _encode(batch, tokenizer, task.dtype):
            pending.append(document)
            tokens += len(document.ids) + 1
            if tokens >= task.shard_tokens:
                write_shard(task.folder, task.shard_name(number), pending, task.boundary, task.dtype)
                pending, tokens, number = [], 0, number + 1
    if pending:
        write_shard(task.folder, task.shard_name(number), pending, task.boundary, task.dtype)
        number += 1
    storage.write_text(
        task.result_path, json.dumps({"shards": number, "documents": taken}, ensure_ascii=False, indent=1) + "\n"
    )
    return taken


def complete_shards(task: TokenizeTask) -> list[dict[str, Any]]:
    """Return the metadata of the shards that a task has completed, in order, up to the first that lost a file."""
    found: list[dict[str, Any]] = []
    while storage.exists(path := storage.join(task.folder, f"{task.shard_name(len(found))}.json")):
        try:
            metadata = read_shard_metadata(path)
            TokenShard(task.folder, metadata, task.dtype).check("sizes")
        except CorruptFileError:
            break
        found.append(metadata)
    return found


def _has_result(task: TokenizeTask, expected: dict[str, int]) -> bool:
    """Return whether a task's result is this one; a damaged file counts as none."""
    try:
        return storage.exists(task.result_path) and read_json(task.result_path, again="") == expected
    except CorruptFileError:
        return False


class _CheckedTokenizer:
    """A worker's tokenizer, which checks that the tokens of every document hold its bytes."""

    def __init__(self, tokenizer: Tokenizer, boundary: int) -> None:
        self.tokenizer, self.boundary = tokenizer, boundary
        self.piece_lengths = tokenizer.piece_lengths()

    def encode(self, batch: list[Document], byte_counts: list[int]) -> tuple[Ids, Offsets]:
        ids, offsets = self.tokenizer.encode_batch([document.text for document in batch])
        encoder = self.tokenizer.encoder
        if len(ids) and int(ids.max()) >= self.tokenizer.vocab_size:
            raise CorruptFileError(
                f"encoder {encoder} gave id {int(ids.max())}, but the vocabulary has {self.tokenizer.vocab_size} ids",
                fix="encode with --encoder reference",
            )
        if (ids == self.boundary).any():
            # The boundary token marks the start of a document, so text must not encode to it.
            raise CorruptFileError(
                f"encoder {encoder} gave the boundary token {self.boundary} for plain text",
                fix="choose another --boundary, or encode with --encoder reference",
            )
        if self.piece_lengths is not None:
            ends = np.concatenate([[0], np.cumsum(self.piece_lengths[ids], dtype=np.int64)])[offsets]
            wrong = np.flatnonzero(np.diff(ends) != np.asarray(byte_counts))
            if len(wrong):
                raise CorruptFileError(
                    f"the tokens of document {batch[int(wrong[0])].id!r} do not hold its bytes (encoder {encoder})",
                    fix="encode with --encoder reference, and report the text",
                )
        return ids, offsets


@lru_cache(maxsize=1)
def _worker_tokenizer(path: str, encoder: str, boundary: int) -> _CheckedTokenizer:
    return _CheckedTokenizer(open_tokenizer(path, encoder=encoder), boundary)


def _encode(batch: list[Document], tokenizer: _CheckedTokenizer, dtype: str) -> list[TokenDocument]:
    byte_counts = [len(d.text) if d.text.isascii() else len(d.text.encode("utf-8")) for d in batch]
    ids, offsets = tokenizer.encode(batch, byte_counts)
    small, edges = ids.astype(dtype), offsets.tolist()
    return [
        TokenDocument(
            ids=small[edges[i] : edges[i + 1]],
            byte_count=byte_counts[i],
            source=document.source,
            licence=_text(document.meta.get("licence", document.meta.get("license"))),
            id=document.id,
            origin=_text(document.meta.get("origin", document.meta.get("url"))),
        )
        for i, document in enumerate(batch)
    ]


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, sort_keys=True)
