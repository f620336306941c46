"""`stream.json` of a run's folder: which windows every step reads.

A run can change its batch size or mixture when it resumes, so the record is a list of segments, each with its first
step and window, its config and its windows per step.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from piledriver.core import storage
from piledriver.core.config import to_mapping
from piledriver.core.errors import ConfigError, CorruptFileError, StorageError, UsageError
from piledriver.core.json_file import checked, damaged_file, read_json
from piledriver.data.cursor import Cursor
from piledriver.data.stream.token_stream import StreamConfig, TokenStream
from piledriver.data.tokens.manifest import MANIFEST
from piledriver.data.tokens.token_set import open_tokens

FILE = "stream.json"
_FORMAT = "piledriver-stream"
_AGAIN = (
    "restore it from a copy; without one, remove it: piledriver train with the same config writes it again, for the "
    "steps still to come"
)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Steps of a run with one config and one batch size."""

    step: int
    """First step."""
    index: int
    """Index of that step's first window in the endless stream."""
    windows_per_step: int
    """Windows of one optimizer step, over all ranks and micro-batches."""
    config: StreamConfig
    """Config of the stream."""
    tokens_sha256: str
    """Checksum of the token shards' manifest, which identifies them."""
    tokens_from_run: str | None = None
    """Path from the run's folder to the token shards; that in the config is relative to the working directory."""

    def __post_init__(self) -> None:
        if self.step < 0 or self.index < 0 or self.windows_per_step < 1:
            raise ConfigError(
                f"windows_per_step is {self.windows_per_step}, index {self.index}, step {self.step}",
                fix="windows_per_step must be positive, the others 0 or more",
            )

    def indices(self, step: int) -> range:
        """Return the indices of a step's windows."""
        first = self.index + (step - self.step) * self.windows_per_step
        return range(first, first + self.windows_per_step)


@dataclass(frozen=True, kw_only=True)
class _Record:
    format: str
    version: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise ConfigError("segments is empty", fix="give one or more")


def record_stream(
    run: storage.Location, stream: TokenStream, *, windows_per_step: int, step: int = 0, cursor: Cursor | None = None
) -> None:
    """Record in a run's folder which windows are read from a step on. Call it when a run starts and when it resumes."""
    if windows_per_step < 1 or step < 0:
        raise UsageError(
            f"windows_per_step is {windows_per_step} and step {step}",
            fix="use windows_per_step >= 1 and step >= 0",
        )
    segment = Segment(
        step=step,
        index=stream.index_of(cursor or stream.start),
        windows_per_step=windows_per_step,
        config=stream.config,
        tokens_sha256=stream.tokens.fingerprint,
        tokens_from_run=_path_from_run(run, stream.config.tokens),
    )
    earlier = read_record(run) if storage.exists(storage.join(run, FILE)) else []
    # Steps from here on are repeated: drop what an earlier attempt recorded about them.
    kept = [old for old in earlier if old.step < step]
    if not (kept and _continues(kept[-1], segment)):
        kept.append(segment)
    tree = {"format": _FORMAT, "version": 1, "segments": [_plain(one) for one in kept]}
    storage.write_text(storage.join(run, FILE), json.dumps(tree, ensure_ascii=False, indent=1) + "\n")


def read_record(run: storage.Location) -> list[Segment]:
    """Return the segments of a run in order."""
    path = storage.join(run, FILE)
    if not storage.exists(path):
        raise StorageError(f"{path} is missing, so this is not a run's folder", fix="give the folder of a run")
    tree = read_json(path, again=_AGAIN)
    named = (tree.get("format"), tree.get("version"))
    if named != (_FORMAT, 1):
        raise damaged_file(path, f"format {named[0]!r} version {named[1]!r}", again=_AGAIN)
    return list(checked(_Record, tree, path, again=_AGAIN).segments)


def segment_of(segments: list[Segment], step: int) -> Segment:
    """Return the segment that a step belongs to."""
    fitting = [segment for segment in segments if segment.step <= step]
    if step < 0 or not fitting:
        raise UsageError(f"the run has no step {step}", fix=f"choose a step >= {segments[0].step}")
    return fitting[-1]


def open_segment(
    segment: Segment, tokens: storage.Location | None = None, *, run: storage.Location | None = None
) -> TokenStream:
    """Return the stream of a segment over the shards that it was recorded with.

    `run` is the run's folder: token shards are also looked for relative to it, in case it was moved.
    """
    opened = open_tokens(tokens if tokens is not None else _recorded(segment, run), check="sizes")
    if opened.fingerprint != segment.tokens_sha256:
        raise CorruptFileError(
            f"{storage.join(opened.folder, MANIFEST)}: checksum {opened.fingerprint[:12]}... differs from "
            f"{segment.tokens_sha256[:12]}... recorded in {FILE}",
            fix="point --tokens (or data.tokens) at the shards that this run was trained on",
        )
    return TokenStream(segment.config, opened)


def _recorded(segment: Segment, run: storage.Location | None) -> str:
    named = str(segment.config.tokens)
    places = [named] if run is None else [named, storage.join(run, os.path.basename(named.rstrip("/")))]
    if run is not None and segment.tokens_from_run is not None:
        places.append(os.path.normpath(storage.join(run, segment.tokens_from_run)))
    manifests = {folder: path for folder in places if storage.exists(path := storage.join(folder, MANIFEST))}
    for folder, path in manifests.items():
        # Another folder may hold other shards under the same name; if none fits, the error names the first.
        if storage.sha256(path) == segment.tokens_sha256:
            return folder
    if manifests:
        return next(iter(manifests))
    raise StorageError(
        f"the run's token shards are not at {' or '.join(dict.fromkeys(places))}", fix="give their folder with --tokens"
    )


def _path_from_run(run: storage.Location, tokens: str) -> str | None:
    if storage.is_remote(run) or storage.is_remote(tokens):
        return None
    return os.path.relpath(os.path.realpath(tokens), os.path.realpath(run))


def _continues(old: Segment, new: Segment) -> bool:
    same = (old.config, old.windows_per_step, old.tokens_sha256) == (
        new.config,
        new.windows_per_step,
        new.tokens_sha256,
    )
    return same and old.indices(new.step)[0] == new.index


def _plain(segment: Segment) -> dict[str, Any]:
    return {**asdict(segment), "config": to_mapping(segment.config)}
