"""A teacher's outputs as shards: the k largest log-probabilities of every token of some windows of a stream.

The teacher runs once, in any place; students read what they need by the index of a window. A shard is one file with
ids and log-probabilities, written whole or not at all; an interrupted writer continues after the last whole shard.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from piledriver.compress.distil.loss import Distribution
from piledriver.compress.distil.teacher import Teacher
from piledriver.core import storage
from piledriver.core.config import to_mapping
from piledriver.core.errors import CorruptFileError, UsageError
from piledriver.data.stream.loader import TokenBatch, to_tensors
from piledriver.data.stream.token_stream import StreamConfig, TokenStream
from piledriver.models import Transformer

_MANIFEST = "teacher.json"
_FORMAT = "piledriver-teacher-logits"


def write_teacher_logits(
    teacher: Transformer,
    stream: TokenStream,
    out: str,
    *,
    windows: int,
    top_k: int = 64,
    windows_per_shard: int = 256,
    batch_tokens: int = 8192,
    say: Callable[[str], None] | None = None,
) -> str:
    """Write the top-k log-probabilities of the first windows of a stream; return the folder.

    Windows are numbered from the start of the endless stream, as a training run with the same data and seed reads them.
    """
    if not 1 <= top_k <= teacher.config.vocab_size or windows < 1:
        raise UsageError(
            f"top_k is {top_k} and windows {windows}", fix=f"give top_k up to {teacher.config.vocab_size}, windows >= 1"
        )
    storage.make_folder(out)
    about = _about(stream.config, stream, top_k, windows_per_shard)
    manifest = _read(out) if storage.exists(storage.join(out, _MANIFEST)) else {**about, "shards": []}
    if {name: manifest.get(name) for name in about} != about:
        raise UsageError(f"{out} holds outputs with other settings", fix="choose another folder, or remove it")
    device = teacher.device
    runner = Teacher(teacher, top_k=top_k)
    rows = max(1, batch_tokens // stream.config.seq_len)
    for number in range(len(manifest["shards"]), -(-windows // windows_per_shard)):
        first = number * windows_per_shard
        ids, logs = [], []
        for begin in range(first, first + windows_per_shard, rows):
            batch = to_tensors(stream.read(begin, min(rows, first + windows_per_shard - begin)), begin, device)
            outputs = runner.outputs(batch, masks_documents=stream.config.masks_documents)
            for token in range(0, batch.inputs.numel(), 1024):
                found = outputs.chunk(token, min(token + 1024, batch.inputs.numel()), 1.0)
                assert found.ids is not None
                ids.append(found.ids.to("cpu", torch.int32).numpy())
                logs.append(found.log_q.to("cpu", torch.float16).numpy())
        shape = (windows_per_shard, stream.config.seq_len, top_k)
        content = io.BytesIO()
        np.save(content, np.concatenate(ids).reshape(shape).astype(_id_dtype(teacher.config.vocab_size)))
        np.save(content, np.concatenate(logs).reshape(shape))
        name = f"{number:05}.npy"
        storage.write_bytes(storage.join(out, name), content.getvalue())
        manifest["shards"].append({"file": name, "sha256": storage.sha256(storage.join(out, name))})
        storage.write_text(storage.join(out, _MANIFEST), json.dumps(manifest, indent=1) + "\n")
        if say is not None:
            say(f"{min(windows, first + windows_per_shard)} of {windows} windows")
    return out


class StoredOutputs:
    """The teacher's outputs of a batch, read from shards."""

    def __init__(self, ids: torch.Tensor, log_q: torch.Tensor) -> None:
        self._ids, self._log_q = ids.flatten(0, -2), log_q.flatten(0, -2)

    def chunk(self, begin: int, end: int, temperature: float) -> Distribution:
        """See `TeacherOutputs`; a temperature other than 1 needs all logits and was rejected before."""
        assert temperature == 1.0
        return Distribution(self._log_q[begin:end].float(), self._ids[begin:end].long())


class StoredTeacher:
    """Reads the outputs that `write_teacher_logits` wrote."""

    def __init__(self, folder: str, stream: TokenStream) -> None:
        self._folder, self._manifest = folder, _read(folder)
        self.top_k: int = self._manifest["top_k"]
        about = _about(stream.config, stream, self.top_k, self._manifest["windows_per_shard"])
        for name, wanted in about.items():
            if self._manifest.get(name) != wanted:
                raise UsageError(
                    f"{folder} was written for {name}={self._manifest.get(name)}, the run reads {wanted}",
                    fix="train on the same tokens, seed, seq_len and packing, or write the outputs again",
                )
        self.windows: int = len(self._manifest["shards"]) * self._manifest["windows_per_shard"]
        self._open: dict[int, tuple[npt.NDArray[Any], npt.NDArray[np.float16]]] = {}

    def outputs(self, batch: TokenBatch) -> StoredOutputs:
        """Return the stored outputs of a batch of the run."""
        size = self._manifest["windows_per_shard"]
        ids, logs = [], []
        for window in range(batch.index, batch.index + batch.inputs.shape[0]):
            if window >= self.windows:
                raise UsageError(
                    f"the run reads window {window}, {self._folder} has {self.windows}", fix="write more windows"
                )
            found = self._shard(window // size)
            ids.append(found[0][window % size])
            logs.append(found[1][window % size])
        device = batch.inputs.device
        return StoredOutputs(
            torch.from_numpy(np.stack(ids).astype(np.int64)).to(device), torch.from_numpy(np.stack(logs)).to(device)
        )

    def _shard(self, number: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.float16]]:
        if number not in self._open:
            entry = self._manifest["shards"][number]
            path = storage.join(self._folder, entry["file"])
            if storage.sha256(path) != entry["sha256"]:
                raise CorruptFileError(f"{path}: its checksum differs from {_MANIFEST}", fix="write the outputs again")
            content = io.BytesIO(storage.read_bytes(path))
            self._open = {
                number: (np.load(content, allow_pickle=False), np.load(content, allow_pickle=False))
            }  # one shard at a time
        return self._open[number]


def _about(config: StreamConfig, stream: TokenStream, top_k: int, windows_per_shard: int) -> dict[str, Any]:
    """Return what the index of a window depends on."""
    settings = {name: value for name, value in to_mapping(config).items() if name != "tokens"}
    return {
        "format": _FORMAT,
        "tokens": stream.tokens.manifest["tokens"],
        "stream": json.loads(json.dumps(settings)),
        "top_k": top_k,
        "windows_per_shard": windows_per_shard,
    }


def _id_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def _read(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, _MANIFEST)
    try:
        found = json.loads(storage.read_text(path))
    except ValueError as error:
        raise CorruptFileError(f"{path} is not JSON: {error}", fix="write the outputs again") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise CorruptFileError(f"{path} does not describe teacher outputs", fix="give the folder of teacher outputs")
    return found
