"""`tokenize_corpus`: text shards to token shards, in parallel and resumable, with the same bytes in any run.

Tasks are cut by the input alone (a file, or some frames of a large one), and a shard counts once its metadata file is
there. Any number of workers and any history of interruptions therefore give the same files.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import xxhash

from piledriver.core import storage
from piledriver.core.errors import ConfigError, CorruptFileError, PiledriverError, UsageError
from piledriver.core.json_file import read_json
from piledriver.core.progress import Progress, progress
from piledriver.core.worker_pool import FailedTask, WorkerPool
from piledriver.corpus import read_shards
from piledriver.corpus.shards.reader import shard_paths
from piledriver.corpus.shards.seek_table import read_table
from piledriver.data.tokenizer.encoders import same_encoding
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.data.tokens.manifest import FORMAT, MANIFEST, read_manifest
from piledriver.data.tokens.shard import token_dtype
from piledriver.data.tokens.task import TokenizeTask, complete_shards, run_task
from piledriver.data.tokens.token_set import PIECE_BYTES, TokenSet, open_tokens

JOB = "job.json"
_TASK_SECONDS = 24 * 3600.0
_TASK_MEMORY = 32 << 30
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig:
    """Settings of tokenisation."""

    shard_tokens: int = 1 << 26
    """Approximate number of tokens in a shard."""
    unit_bytes: int = 1 << 28
    """Approximate bytes of text in a task; larger files are cut by frames."""
    boundary: str | None = None
    """Special token between documents; found by its usual names if not given."""
    encoder: str | None = None
    """Library that encodes; the fastest exact one if not given."""

    def __post_init__(self) -> None:
        for name in ("shard_tokens", "unit_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", fix="it must be 1 or more")


def tokenize_corpus(
    corpus: storage.Location,
    tokenizer: storage.Location,
    out: storage.Location,
    settings: TokenizeConfig | None = None,
    *,
    workers: int = 1,
) -> TokenSet:
    """Tokenise a corpus into a folder of token shards and open it.

    Run it again to resume after an interruption, or to restore a lost file.
    """
    settings = settings or TokenizeConfig()
    opened = open_tokenizer(tokenizer, encoder=settings.encoder)
    inputs = shard_paths(corpus)
    if next(read_shards(corpus), None) is None:
        raise PiledriverError(f"{corpus} has no documents", fix="check the build that wrote it")
    states = {path: _state(path) for path in inputs}
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
    job = _claim(out, job, inputs, corpus)
    # Workers open the copy beside the shards: what is recorded is what was used.
    copy = storage.join(out, _copy_name(tokenizer, opened))
    storage.write_bytes(copy, opened.content)
    lengths = opened.piece_lengths()
    if lengths is not None:
        buffer = io.BytesIO()
        np.save(buffer, lengths, allow_pickle=False)
        storage.write_bytes(storage.join(out, PIECE_BYTES), buffer.getvalue())
    encoder = _verified_encoder(opened, copy, inputs)
    tasks = [
        TokenizeTask(
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
    with progress("tokenize", total=len(tasks), unit="units") as bar:
        bar.note(encoder)
        if not _is_finished(out):
            _run(tasks, workers, bar)
            for path, state in states.items():
                if _state(path) != state:
                    raise PiledriverError(f"{path} changed while it was tokenised", fix=f"remove {out}, run it again")
            _finish(out, job, tasks)
    return open_tokens(out, check="sizes")


def _cut(inputs: list[str], unit_bytes: int) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """Yield (path, part) of each task; cut by file sizes alone."""
    for path in inputs:
        with storage.open_read(path) as file:
            table = read_table(file, path) if path.endswith(".zst") else None
        parts = 1 if table is None else min(table.frame_count, -(-int(table.decompressed[-1]) // unit_bytes))
        if parts <= 1:
            yield path, None
        else:
            yield from ((path, (index, parts)) for index in range(parts))


def _run(tasks: list[TokenizeTask], workers: int, bar: Progress) -> None:
    if workers <= 1:
        for task in tasks:
            run_task(task)
            bar.advance()
        return
    count = min(workers, len(tasks)) or 1
    with WorkerPool(count, run_task, task_seconds=_TASK_SECONDS, memory_bytes=_TASK_MEMORY) as pool:
        for result in pool.map(tasks):
            if isinstance(result, FailedTask):
                raise PiledriverError(f"{result.task.path}: {result.why}", fix="run it again; complete shards are kept")
            bar.advance()


def _verified_encoder(tokenizer: Tokenizer, copy: str, inputs: list[str]) -> str:
    """Return the tokenizer's encoder if it gives the reference's ids on the first documents, else the reference."""
    if tokenizer.encoder == "reference":
        return tokenizer.encoder
    texts = [document.text[:2000] for path in inputs[:8] for document in islice(read_shards(path), 16)]
    reference = open_tokenizer(copy, encoder="reference")
    same = same_encoding(reference.encode_batch(texts), tokenizer.encode_batch(texts))
    return tokenizer.encoder if same else reference.encoder


def _claim(out: storage.Location, job: dict[str, Any], inputs: list[str], root: storage.Location) -> dict[str, Any]:
    """Record the job in its folder and return it; reject a folder of another job."""
    path, folder = storage.join(out, JOB), os.fspath(out)
    if not storage.exists(path):
        if storage.exists(storage.join(out, MANIFEST)) and not job.items() <= read_manifest(out).items():
            raise UsageError(f"{folder} holds other token shards", fix="choose another folder")
        _write_json(path, job)
        return job
    known = read_json(path, again="remove it and run the same command again: complete shards are kept")
    if any("ends_sha256" in entry for entry in known.get("inputs", ())):
        job = {**job, "inputs": [_describe_0_1(path, root) for path in inputs]}
    if known != job:
        same = {**known, "inputs": job["inputs"]} == job
        changed = [entry["name"] for entry in job["inputs"] if entry not in known.get("inputs", ())]
        what = f"other content of {changed[0]}" if same and changed else "another corpus, tokenizer or setting"
        raise UsageError(f"{folder} was begun with {what}", fix="choose another folder, or remove it")
    return job


def _describe(path: str, root: storage.Location) -> dict[str, Any]:
    """Return what identifies an input file: its name in the corpus, its size and a hash of its content."""
    digest = xxhash.xxh3_128()
    with storage.open_read(path) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return {"name": _name_in(path, root), "bytes": storage.size(path), "xxh3_128": digest.hexdigest()}


def _describe_0_1(path: str, root: storage.Location) -> dict[str, Any]:
    """Return the description that version 0.1 wrote, with a checksum of the first and last bytes."""
    size = storage.size(path)
    with storage.open_read(path) as file:
        digest = hashlib.sha256(file.read(1 << 16))
        file.seek(max(0, size - (1 << 16)))
        digest.update(file.read())
    return {"name": _name_in(path, root), "bytes": size, "ends_sha256": digest.hexdigest()}


def _name_in(path: str, root: storage.Location) -> str:
    return path.removeprefix(os.fspath(root)).lstrip("/") or os.path.basename(path)


def _state(path: str) -> tuple[int, int]:
    """Return size and time of a file; a remote file has no time."""
    return storage.size(path), 0 if storage.is_remote(path) else os.stat(path).st_mtime_ns


def _finish(out: storage.Location, job: dict[str, Any], tasks: list[TokenizeTask]) -> None:
    """Write the manifest, which marks the folder as complete; then remove the tasks' files."""
    shards: list[dict[str, Any]] = [shard for task in tasks for shard in complete_shards(task)]
    totals = {key: sum(int(shard[key]) for shard in shards) for key in ("documents", "tokens", "bytes")}
    _write_json(storage.join(out, MANIFEST), {**job, **totals, "shards": shards})
    for task in tasks:
        storage.remove_file(task.result_path)


def _is_finished(out: storage.Location) -> bool:
    """Return whether every file is as the manifest says. If not, remove the manifest: tasks look at every shard."""
    if not storage.exists(storage.join(out, MANIFEST)):
        return False
    try:
        open_tokens(out, check="sizes")
    except CorruptFileError:
        storage.remove_file(storage.join(out, MANIFEST))
        return False
    return True


def _write_json(path: str, tree: dict[str, Any]) -> None:
    storage.write_text(path, json.dumps(tree, ensure_ascii=False, indent=1) + "\n")


def _copy_name(tokenizer: storage.Location, opened: Tokenizer) -> str:
    # tiktoken files are identified by their names; the others get a plain one.
    return os.path.basename(os.fspath(tokenizer)) if opened.suffix == ".tiktoken" else f"tokenizer{opened.suffix}"
