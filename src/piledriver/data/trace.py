"""Trace steps to documents and documents to steps, by arithmetic on the run's record; nothing is replayed.

Byte ranges come from the byte lengths of tokens, which are saved with the shards; they are unknown for tokenizers that
change text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from piledriver.core import storage
from piledriver.core.errors import UsageError
from piledriver.data.record import Segment, open_segment, read_record, segment_of
from piledriver.data.stream.token_stream import TokenStream
from piledriver.data.tokens.token_set import DocumentPlace


@dataclass(frozen=True)
class Sighting:
    """A part of a document that a window of a step holds."""

    step: int
    window: int
    """Number of the window in its step."""
    index: int
    """Index of the window in the endless stream."""
    document: str
    source: str
    licence: str
    origin: str
    tokens: tuple[int, int]
    """First token of the document and the token after the last; token 0 is its boundary token."""
    bytes: tuple[int, int] | None
    """First byte of the document's text and the byte after the last; None if the tokenizer changes text."""


def trace_step(run: storage.Location, step: int, tokens: storage.Location | None = None) -> list[Sighting]:
    """Return the documents of one step, in the order of its windows. Future steps can be traced too."""
    segment = segment_of(read_record(run), step)
    stream = open_segment(segment, tokens, run=run)
    found = []
    for number, index in enumerate(segment.indices(step)):
        sources, windows = stream.mixture.locate(np.array([index], dtype=np.int64))
        for shard, first, last in _parts(stream, int(sources[0]), int(windows[0])):
            found += [
                _sighting(stream, place, first, last, step, number, index)
                for place in _documents(stream, shard, first, last)
            ]
    return found


def trace_document(
    run: storage.Location, document: str, *, until: int, tokens: storage.Location | None = None
) -> list[Sighting]:
    """Return every occurrence of a document, by its id, in the steps before `until`."""
    segments = read_record(run)
    found: list[Sighting] = []
    known = False
    for number, segment in enumerate(segments):
        end = min(until, segments[number + 1].step) if number + 1 < len(segments) else until
        if end <= segment.step:
            continue
        stream = open_segment(segment, tokens, run=run)
        places = stream.tokens.find(document)
        known = known or bool(places)
        for place in places:
            found += _seen(stream, segment, place, end)
    if not known:
        raise UsageError(f"the run's token shards have no document {document!r}", fix="check the id")
    return sorted(found, key=lambda sighting: (sighting.step, sighting.window, sighting.tokens))


def _seen(stream: TokenStream, segment: Segment, place: DocumentPlace, end: int) -> Iterator[Sighting]:
    names = stream.mixture.names
    if place.source not in names or place.licence in stream.config.exclude_licences:
        return
    source = names.index(place.source)
    before = segment.indices(end)[0]
    for window in stream.windows.windows_of(source, place.shard, place.start, place.stop):
        for index in stream.mixture.occurrences(source, window, before):
            if index < segment.index:
                continue
            step, within = divmod(index - segment.index, segment.windows_per_step)
            for shard, first, last in _parts(stream, source, window):
                if shard == place.shard and first < place.stop and last > place.start:
                    yield _sighting(stream, place, first, last, segment.step + step, within, index)


def _parts(stream: TokenStream, source: int, window: int) -> list[tuple[int, int, int]]:
    """Return (shard, first token, token after the last) of each part of a window's inputs."""
    left = stream.config.seq_len
    parts = []
    for shard, first, length in stream.windows.segments(source, window):
        # The segments of contiguous windows include the token after the inputs, which is only a label.
        taken = min(left, length)
        if taken:
            parts.append((shard, first, first + taken))
        left -= taken
    return parts


def _documents(stream: TokenStream, shard: int, first: int, last: int) -> list[DocumentPlace]:
    starts = stream.tokens.shards[shard].starts
    low = int(np.searchsorted(starts, first, side="right")) - 1
    high = int(np.searchsorted(starts, last, side="left"))
    return [stream.tokens.place(shard, row) for row in range(low, high)]


def _sighting(
    stream: TokenStream, place: DocumentPlace, first: int, last: int, step: int, window: int, index: int
) -> Sighting:
    low, high = max(first, place.start), min(last, place.stop)
    byte_range = None
    lengths = stream.tokens.piece_bytes
    if lengths is not None:
        tokens = stream.tokens.shards[place.shard].tokens
        before = int(lengths[tokens[place.start : low]].sum())
        byte_range = (before, before + int(lengths[tokens[low:high]].sum()))
    return Sighting(
        step=step,
        window=window,
        index=index,
        document=place.id,
        source=place.source,
        licence=place.licence,
        origin=place.origin,
        tokens=(low - place.start, high - place.start),
        bytes=byte_range,
    )
