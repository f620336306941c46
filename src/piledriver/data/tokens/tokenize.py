"""`tokenize_corpus`: text shards to token shards, in parallel, resumable, the same bytes however it was run.

The work is cut into units by the input alone (a file, or a fixed number of frames of a large one); a unit makes one or
more shards, one after the other. A shard whose note is there is done. So any number of workers, and any history of
interruptions, end in the same files.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from piledriver.core import storage
from piledriver.core.errors import ConfigError, CorruptFileError, PiledriverError, UsageError
from piledriver.core.json_file import read_json
from piledriver.core.progress import Progress, progress
from piledriver.core.worker_pool import FailedTask, WorkerPool
from piledriver.corpus import Document, Part, read_shards
from piledriver.corpus.shards import seek_table as seek_tables
from piledriver.corpus.shards.reader import shard_paths
from piledriver.data.tokenizer.encoders import Ids, Offsets, agree
from piledriver.data.tokenizer.tokenizer import Tokenizer, open_tokenizer
from piledriver.data.tokens.manifest import FORMAT, MANIFEST, read_manifest, read_note
from piledriver.data.tokens.shard import TokenDocument, token_dtype, write_shard
from piledriver.data.tokens.token_set import PIECE_BYTES, TokenSet, TokenShard, open_tokens

JOB = "job.json"
_BATCH_CHARACTERS = 1 << 21


@dataclass(frozen=True, kw_only=True)
class Tokenizing:
    """How to cut the output."""

    shard_tokens: int = 1 << 26
    """About how many tokens a shard holds."""
    unit_bytes: int = 1 << 28
    """About how much text one task reads; large files are cut by frames."""
    boundary: str | None = None
    """The special token between documents; found by its usual names where not given."""
    encoder: str | None = None
    """The library to encode with; the fastest that gives the right ids where not given."""

    def __post_init__(self) -> None:
        if self.shard_tokens < 1 or self.unit_bytes < 1:
            raise ConfigError("shard_tokens and unit_bytes must be positive", fix="leave them out")


@dataclass(frozen=True)
class Unit:
    """One task: a file, or a part of its frames, with all that a worker needs to know."""

    number: int
    path: str
    part: tuple[int, int] | None
    folder: str
    tokenizer: str
    boundary: int
    dtype: str
    shard_tokens: int
    encoder: str


def tokenize_corpus(
    corpus: storage.Location,
    tokenizer: storage.Location,
    out: storage.Location,
    settings: Tokenizing | None = None,
    *,
    workers: int = 1,
) -> TokenSet:
    """Tokenise a corpus into a folder; run it again after an interruption, or where a file is lost, and it goes on."""
    settings = settings or Tokenizing()
    opened = open_tokenizer(tokenizer, encoder=settings.encoder)
    inputs = shard_paths(corpus)
    if next(read_shards(corpus), None) is None:
        raise PiledriverError(f"{corpus} has no documents", fix="check what wrote it")
    job = {
        "format": FORMAT,
        "version": 1,
        "dtype": token_dtype(opened.vocab_size),
        "vocab_size": opened.vocab_size,
        "boundary": opened.boundary(settings.boundary),
        "tokenizer": {"file": _copy_name(tokenizer, opened), "sha256": opened.fingerprint},
        "shard_tokens": settings.shard_tokens,
        "unit_bytes": settings.unit_bytes,
        "inputs": [_describe(path, corpus) for path in inputs],
    }
    _claim(out, job)
    # The copy beside the shards is the one that the workers open: what is recorded is what was used.
    copy = storage.join(out, _copy_name(tokenizer, opened))
    storage.write_bytes(copy, opened.content)
    lengths = opened.piece_lengths()
    if lengths is not None:
        buffer = io.BytesIO()
        np.save(buffer, lengths, allow_pickle=False)
        storage.write_bytes(storage.join(out, PIECE_BYTES), buffer.getvalue())
    encoder = _checked_encoder(opened, copy, inputs)
    units = [
        Unit(
            number=number,
            path=path,
            part=part,
            folder=os.fspath(out),
            tokenizer=copy,
            boundary=opened.boundary(settings.boundary),
            dtype=token_dtype(opened.vocab_size),
            shard_tokens=settings.shard_tokens,
            encoder=encoder,
        )
        for number, (path, part) in enumerate(_cut(inputs, settings.unit_bytes))
    ]
    with progress("tokenize", total=len(units), unit="units") as bar:
        bar.note(encoder)
        if not _is_finished(out):
            _run(units, workers, bar)
            _finish(out, job, units)
    return open_tokens(out, check="sizes")


def tokenize_unit(unit: Unit) -> int:
    """Do one unit, from where an earlier run left it; the number of documents in it."""
    note, done = _unit_note(unit), _whole_shards(unit)
    taken = sum(int(shard["documents"]) for shard in done)
    if _says(note, {"shards": len(done), "documents": taken}):
        return taken
    part = Part(*unit.part) if unit.part is not None else None
    documents = islice(read_shards(unit.path, part=part), taken, None)
    number, tokens = len(done), 0
    pending: list[TokenDocument] = []
    for batch in _batches(documents):
        taken += len(batch)
        # Shards are cut by documents, never by batches: a resumed unit has other batches and the same shards.
        for document in _encode(batch, _worker_tokenizer(unit.tokenizer, unit.encoder, unit.boundary), unit.dtype):
            pending.append(document)
            tokens += len(document.ids) + 1
            if tokens >= unit.shard_tokens:
                write_shard(unit.folder, _shard_name(unit, number), pending, unit.boundary, unit.dtype)
                pending, tokens, number = [], 0, number + 1
    if pending:
        write_shard(unit.folder, _shard_name(unit, number), pending, unit.boundary, unit.dtype)
        number += 1
    _write_json(note, {"shards": number, "documents": taken})
    return taken


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _CheckedTokenizer:
    """A worker's tokenizer, which checks that the bytes of every document are in its tokens."""

    def __init__(self, tokenizer: Tokenizer, boundary: int) -> None:
        self.tokenizer, self.boundary = tokenizer, boundary
        self.piece_lengths = tokenizer.piece_lengths()

    def encode(self, batch: list[Document], byte_counts: list[int]) -> tuple[Ids, Offsets]:
        ids, offsets = self.tokenizer.encode_batch([document.text for document in batch])
        encoder = self.tokenizer.encoder
        if len(ids) and int(ids.max()) >= self.tokenizer.vocab_size:
            raise CorruptFileError(
                f"the encoder {encoder} gave id {int(ids.max())}, the vocabulary has {self.tokenizer.vocab_size}",
                fix="encode with --encoder reference",
            )
        if (ids == self.boundary).any():
            # Documents are found again by their boundary token, so text must not make one.
            raise CorruptFileError(
                f"the encoder {encoder} made the boundary token {self.boundary} from plain text",
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


def _cut(inputs: list[str], unit_bytes: int) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """The units that files are cut into, by their sizes alone."""
    for path in inputs:
        with storage.open_read(path) as file:
            table = seek_tables.read(file, path) if path.endswith(".zst") else None
        parts = 1 if table is None else min(table.frame_count, -(-int(table.decompressed[-1]) // unit_bytes))
        if parts <= 1:
            yield path, None
        else:
            yield from ((path, (index, parts)) for index in range(parts))


def _run(units: list[Unit], workers: int, bar: Progress) -> None:
    if workers <= 1:
        for unit in units:
            tokenize_unit(unit)
            bar.advance()
        return
    count = min(workers, len(units)) or 1
    with WorkerPool(count, tokenize_unit, task_seconds=_TASK_SECONDS, memory_bytes=_MEMORY) as pool:
        for result in pool.map(units):
            if isinstance(result, FailedTask):
                raise PiledriverError(f"{result.task.path}: {result.why}", fix="run it again; whole shards are kept")
            bar.advance()


_TASK_SECONDS = 24 * 3600.0
_MEMORY = 32 << 30


def _checked_encoder(tokenizer: Tokenizer, copy: str, inputs: list[str]) -> str:
    """The chosen encoder, once more against the reference on the corpus's own beginning."""
    if tokenizer.encoder == "reference":
        return tokenizer.encoder
    texts = [document.text[:2000] for path in inputs[:8] for document in islice(read_shards(path), 16)]
    reference = open_tokenizer(copy, encoder="reference")
    same = agree(reference.encode_batch(texts), tokenizer.encode_batch(texts))
    return tokenizer.encoder if same else reference.encoder


def _claim(out: storage.Location, job: dict[str, Any]) -> None:
    """Take the folder for this job, or go on with it; another job's folder is refused."""
    path = storage.join(out, JOB)
    if not storage.exists(path):
        if storage.exists(storage.join(out, MANIFEST)) and not job.items() <= read_manifest(out).items():
            raise UsageError(f"{os.fspath(out)} holds other token shards", fix="choose another folder")
        _write_json(path, job)
        return
    again = "remove it and run the same command again: whole shards are kept"
    if read_json(path, again=again) != job:
        raise UsageError(
            f"{os.fspath(out)} was begun with another corpus, tokenizer or setting",
            fix="choose another folder, or remove it",
        )


def _describe(path: str, root: storage.Location) -> dict[str, Any]:
    """What an input file is recognised by: its name below the corpus, its size, its beginning and its end."""
    size = storage.size(path)
    with storage.open_read(path) as file:
        digest = hashlib.sha256(file.read(1 << 16))
        file.seek(max(0, size - (1 << 16)))
        digest.update(file.read())
    name = path.removeprefix(os.fspath(root)).lstrip("/") or os.path.basename(path)
    return {"name": name, "bytes": size, "ends_sha256": digest.hexdigest()}


def _finish(out: storage.Location, job: dict[str, Any], units: list[Unit]) -> None:
    """Write the manifest, the one file that says that all is there; then drop the notes of the units."""
    shards: list[dict[str, Any]] = [shard for unit in units for shard in _whole_shards(unit)]
    totals = {key: sum(int(shard[key]) for shard in shards) for key in ("documents", "tokens", "bytes")}
    _write_json(storage.join(out, MANIFEST), {**job, **totals, "shards": shards})
    for unit in units:
        storage.remove(_unit_note(unit))


def _is_finished(out: storage.Location) -> bool:
    """Whether every file is there as the manifest says. One that is not goes, for the shards are gone through again."""
    if not storage.exists(storage.join(out, MANIFEST)):
        return False
    try:
        open_tokens(out, check="sizes")
    except CorruptFileError:
        storage.remove(storage.join(out, MANIFEST))
        return False
    return True


def _whole_shards(unit: Unit) -> list[dict[str, Any]]:
    """The notes of the shards that the unit has finished, in order, up to one that has lost a file since."""
    notes: list[dict[str, Any]] = []
    while storage.exists(path := storage.join(unit.folder, f"{_shard_name(unit, len(notes))}.json")):
        try:
            note = read_note(path)
            TokenShard(unit.folder, note, unit.dtype).check("sizes")
        except CorruptFileError:
            break
        notes.append(note)
    return notes


def _says(note: str, expected: dict[str, int]) -> bool:
    """Whether a unit's note is there and says just this; any other is written again."""
    try:
        return storage.exists(note) and read_json(note, again="") == expected
    except CorruptFileError:
        return False


def _shard_name(unit: Unit, number: int) -> str:
    return f"{unit.number:05d}-{number:03d}"


def _unit_note(unit: Unit) -> str:
    return storage.join(unit.folder, f"unit-{unit.number:05d}.json")


def _write_json(path: str, tree: dict[str, Any]) -> None:
    storage.write_text(path, json.dumps(tree, ensure_ascii=False, indent=1) + "\n")


def _copy_name(tokenizer: storage.Location, opened: Tokenizer) -> str:
    # tiktoken files are known by their names; the others get a plain one.
    return os.path.basename(os.fspath(tokenizer)) if opened.suffix == ".tiktoken" else f"tokenizer{opened.suffix}"
