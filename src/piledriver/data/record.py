"""What a run's folder says about its data: `stream.json`, enough to find every window of every step again.

A run can change its batch size, or its mixture, when it resumes. So the record is a list of segments: from which step
and which window on, with which config and how many windows per step.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from piledriver.core import storage
from piledriver.core.config import to_mapping
from piledriver.core.errors import ConfigError, CorruptFileError, StorageError, UsageError
from piledriver.core.json_file import checked, damaged, read_json
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
    """A stretch of a run with one config and one batch size."""

    step: int
    """The first step."""
    index: int
    """The first window of that step in the endless stream."""
    windows_per_step: int
    """Windows that one optimizer step takes, over all processes and micro-batches."""
    config: StreamConfig
    """The stream."""
    tokens_sha256: str
    """The manifest of the token shards: they are the same only if this is."""
    tokens_from_run: str | None = None
    """The way from the run's folder to the token shards: the config's is from where the user stood."""

    def __post_init__(self) -> None:
        if self.step < 0 or self.index < 0 or self.windows_per_step < 1:
            raise ConfigError(f"{self.windows_per_step} windows from {self.index} on at step {self.step}")

    def indices(self, step: int) -> range:
        """The windows of a step."""
        first = self.index + (step - self.step) * self.windows_per_step
        return range(first, first + self.windows_per_step)


@dataclass(frozen=True, kw_only=True)
class _Record:
    format: str
    version: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise ConfigError("it has no segments")


def record_stream(
    run: storage.Location, stream: TokenStream, *, windows_per_step: int, step: int = 0, cursor: Cursor | None = None
) -> None:
    """Note in a run's folder how its data is read from a step on; call it when a run starts and when it resumes."""
    if windows_per_step < 1 or step < 0:
        raise UsageError(f"windows_per_step {windows_per_step} at step {step}", fix="give a batch of one or more")
    segment = Segment(
        step=step,
        index=stream.index_of(cursor or stream.start),
        windows_per_step=windows_per_step,
        config=stream.config,
        tokens_sha256=stream.tokens.fingerprint,
        tokens_from_run=_way(run, stream.config.tokens),
    )
    earlier = read_record(run) if storage.exists(storage.join(run, FILE)) else []
    # Steps from here on are taken again: what an earlier attempt noted about them is no longer so.
    kept = [old for old in earlier if old.step < step]
    if not (kept and _continues(kept[-1], segment)):
        kept.append(segment)
    tree = {"format": _FORMAT, "version": 1, "segments": [_plain(one) for one in kept]}
    storage.write_text(storage.join(run, FILE), json.dumps(tree, ensure_ascii=False, indent=1) + "\n")


def read_record(run: storage.Location) -> list[Segment]:
    """The segments of a run, first to last."""
    path = storage.join(run, FILE)
    if not storage.exists(path):
        raise StorageError(f"{path} is missing: the run did not read a token stream", fix="give the folder of a run")
    tree = read_json(path, again=_AGAIN)
    named = (tree.get("format"), tree.get("version"))
    if named != (_FORMAT, 1):
        raise damaged(path, f"format {named[0]!r} version {named[1]!r}", again=_AGAIN)
    return list(checked(_Record, tree, path, again=_AGAIN).segments)


def segment_of(segments: list[Segment], step: int) -> Segment:
    """The segment that a step belongs to."""
    fitting = [segment for segment in segments if segment.step <= step]
    if step < 0 or not fitting:
        raise UsageError(f"the run has no step {step}", fix=f"choose a step from {segments[0].step} on")
    return fitting[-1]


def open_segment(
    segment: Segment, tokens: storage.Location | None = None, *, run: storage.Location | None = None
) -> TokenStream:
    """The stream of a segment, over the very shards that it was recorded with.

    `run` is where else to look: a run that is looked at from another folder, or was moved, has its shards below it.
    """
    opened = open_tokens(tokens if tokens is not None else _recorded(segment, run), check="sizes")
    if opened.fingerprint != segment.tokens_sha256:
        raise CorruptFileError(
            f"the token shards in {opened.folder} are not those that the run read", fix="give the right ones"
        )
    return TokenStream(segment.config, opened)


def _recorded(segment: Segment, run: storage.Location | None) -> str:
    named = str(segment.config.tokens)
    places = [named] if run is None else [named, storage.join(run, os.path.basename(named.rstrip("/")))]
    if run is not None and segment.tokens_from_run is not None:
        places.append(os.path.normpath(storage.join(run, segment.tokens_from_run)))
    manifests = {folder: path for folder in places if storage.exists(path := storage.join(folder, MANIFEST))}
    for folder, path in manifests.items():
        # Another folder may have shards under the same name; where none are the right ones the first is complained of.
        if storage.sha256(path) == segment.tokens_sha256:
            return folder
    if manifests:
        return next(iter(manifests))
    raise StorageError(
        f"the run's token shards are not at {' or '.join(dict.fromkeys(places))}", fix="name them with --tokens"
    )


def _way(run: storage.Location, tokens: str) -> str | None:
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
