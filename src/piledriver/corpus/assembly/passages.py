"""What the tasks do to parts of documents: evaluation text, repeated paragraphs, repeated spans of bytes.

As in steps.py, each function fills one folder from others and from its arguments alone.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from piledriver.core import storage
from piledriver.core.config import from_mapping
from piledriver.core.errors import PiledriverError
from piledriver.corpus.assembly.chunks import Dropped, write_chunk
from piledriver.corpus.assembly.steps import ARRAYS, arrays_of, documents_of, runs_of
from piledriver.corpus.assembly.tasks import task_folder, work_of
from piledriver.corpus.dedup import contamination, substring
from piledriver.corpus.dedup.arrays import ArrayFile, write_arrays
from piledriver.corpus.dedup.contamination import DecontaminationSettings
from piledriver.corpus.dedup.paragraphs import ParagraphSettings, units, without
from piledriver.corpus.dedup.substring import SubstringSettings
from piledriver.corpus.document import Document, document_id
from piledriver.corpus.shard_reader import read_texts

UInt64Array = npt.NDArray[np.uint64]
_NAMES = "names.json"


def contamination_index(folder: str, files: list[list[str]], words: int, payload: list[str]) -> dict[str, Any]:
    """The word sequences of the evaluation texts; `files` are origins and checksums, `payload` the paths."""
    names: list[str] = []

    def texts() -> Iterator[tuple[int, str]]:
        for (origin, checksum), path in zip(files, payload, strict=True):
            if storage.sha256(path) != checksum:
                raise PiledriverError(f"{path} changed while the corpus was built", fix="run the build again")
            if path.endswith((".jsonl", ".jsonl.zst", ".jsonl.gz")):
                for number, text in enumerate(read_texts(path)):
                    names.append(f"{origin}#{number}")
                    yield len(names) - 1, text
            else:
                names.append(origin)
                yield len(names) - 1, storage.read_text(path)

    hashes, owners, short = contamination.index(texts(), words)
    if not len(hashes):
        raise PiledriverError(
            f"the evaluation text has no sequence of {words} words", fix="check the files of the decontaminate stage"
        )
    write_arrays(os.path.join(folder, ARRAYS), hashes=hashes, owners=owners)
    storage.write_text(os.path.join(folder, _NAMES), json.dumps(names, ensure_ascii=False))
    return {"texts": len(names), "sequences": len(hashes), "texts_too_short": short}


def decontaminate_chunk(folder: str, chunk: str, index: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One chunk without the evaluation text in it. A document that is cut gives way to its pieces."""
    rules = from_mapping(DecontaminationSettings, {**settings, "files": ["in the index"]}, "decontaminate")
    known = contamination.Index(arrays_of(folder, index), rules.words)
    names = json.loads(storage.read_text(os.path.join(task_folder(work_of(folder), index), _NAMES)))
    hits: Counter[str] = Counter()

    def judged() -> Iterator[Document | Dropped]:
        for document in documents_of(folder, chunk):
            spans, owners = known.hits(document.text)
            if not spans:
                yield document
                continue
            found = [names[owner] for owner in owners]
            hits.update(found)
            detail = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            pieces = _pieces(document, spans, rules)
            reason = "cut around evaluation text" if pieces else "evaluation text"
            kept = pieces[0].id if pieces else ""
            yield Dropped(document.id, document.source, "decontaminate", reason, detail, kept)
            yield from pieces

    return {**write_chunk(folder, judged()), "hits": dict(sorted(hits.items()))}


def _pieces(document: Document, spans: list[tuple[int, int]], rules: DecontaminationSettings) -> list[Document]:
    if rules.action == "remove":
        return []
    left = contamination.pieces_around(len(document.text), spans, rules.cut_characters, rules.min_piece_characters)
    if len(left) > rules.max_pieces:
        return []
    return [
        Document(
            document.text[begin:end],
            document_id(document.text[begin:end], document.source, f"{document.id}:{begin}"),
            document.source,
            {**document.meta, "cut_from": document.id, "cut_at": begin},
        )
        for begin, end in left
    ]


def paragraph_hashes(folder: str, chunk: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Two hashes of each line or paragraph that is long enough, in the order of the first; as `exact_hashes` writes."""
    rules = from_mapping(ParagraphSettings, settings, "paragraphs")
    found = [hashed for document in documents_of(folder, chunk) for *_, hashed in units(document.text, rules) if hashed]
    pairs = np.array(found, np.uint64).reshape(-1, 2)
    order = np.argsort(pairs[:, 0], kind="stable")
    write_arrays(
        os.path.join(folder, ARRAYS),
        hashes=pairs[order, 0][None],
        checks=pairs[order, 1][None],
        documents=order.astype(np.uint64)[None],
    )
    return {"units": len(pairs)}


def repeated_paragraphs(folder: str, runs: list[list[Any]], low: int, high: int) -> dict[str, Any]:
    """The ordinals of the units in one range of hashes that are not the first of their kind."""
    value, check, ordinal = (np.concatenate(part) for part in zip(*_ranges(folder, runs, low, high), strict=True))
    order = np.lexsort((ordinal, check, value))
    value, check, ordinal = value[order], check[order], ordinal[order]
    same = (value[1:] == value[:-1]) & (check[1:] == check[:-1])
    repeated = np.sort(ordinal[1:][same])
    write_arrays(os.path.join(folder, ARRAYS), repeated=repeated)
    return {"repeated": len(repeated)}


def _ranges(
    folder: str, runs: list[list[Any]], low: int, high: int
) -> Iterator[tuple[UInt64Array, UInt64Array, UInt64Array]]:
    for run in runs_of(folder, runs):
        file = ArrayFile(run.path)
        begin, end = file.searchsorted("hashes", 0, low), file.searchsorted("hashes", 0, high)
        places = file.slice("documents", 0, begin, end).astype(np.uint64) + np.uint64(run.first)
        yield file.slice("hashes", 0, begin, end), file.slice("checks", 0, begin, end), places


def drop_paragraphs(
    folder: str, chunk: str, first: int, count: int, repeated: list[str], settings: dict[str, Any]
) -> dict[str, Any]:
    """One chunk without its repeated units; `first` is the ordinal of its first unit."""
    rules = from_mapping(ParagraphSettings, settings, "paragraphs")
    gone: set[int] = set()
    for key in repeated:
        file = ArrayFile(arrays_of(folder, key))
        low, high = (file.position("repeated", edge) for edge in (first, first + count))
        gone.update(file.rows("repeated", low, high).tolist())
    removed: Counter[str] = Counter()

    def kept() -> Iterator[Document | Dropped]:
        at = first
        for document in documents_of(folder, chunk):
            text, units_removed, compared = without(document.text, rules, at, gone)
            at += compared
            if not units_removed:
                yield document
                continue
            removed[f"{rules.unit}s"] += units_removed
            removed["characters"] += len(document.text) - len(text)
            if not text.strip() or len(text) < rules.min_kept * len(document.text):
                detail = f"{len(text)} of {len(document.text)} characters left"
                yield Dropped(document.id, document.source, "paragraphs", f"repeated {rules.unit}s", detail)
            else:
                yield msgspec.structs.replace(document, text=text)

    return {**write_chunk(folder, kept()), "removed": dict(removed)}


def substring_fingerprints(folder: str, chunk: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Fingerprints of a chunk in order of their hashes, with their places in its bytes, and where documents begin."""
    rules = from_mapping(SubstringSettings, settings, "substring")
    hashes, places, starts = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)], [0]
    for document in documents_of(folder, chunk):
        content = substring.as_bytes(document.text)
        found, at = substring.fingerprints(content, rules.min_bytes)
        hashes.append(found)
        places.append(at.astype(np.uint64) + np.uint64(starts[-1]))
        starts.append(starts[-1] + len(content))
    value, place = np.concatenate(hashes), np.concatenate(places)
    order = np.argsort(value, kind="stable")
    write_arrays(
        os.path.join(folder, ARRAYS),
        hashes=value[order][None],
        documents=place[order][None],
        starts=np.array(starts, np.uint64),
    )
    return {"fingerprints": len(value), "bytes": starts[-1]}


def substring_meetings(folder: str, runs: list[list[Any]], low: int, high: int) -> dict[str, Any]:
    """(place, earlier place) of equal fingerprints in one range of hashes, by the later place."""
    values, places = [], []
    for run in runs_of(folder, runs):
        file = ArrayFile(run.path)
        begin, end = file.searchsorted("hashes", 0, low), file.searchsorted("hashes", 0, high)
        values.append(file.slice("hashes", 0, begin, end))
        places.append(file.slice("documents", 0, begin, end) + np.uint64(run.first))
    # Runs are in the order of the corpus, so a stable sort leaves equal hashes in the order of their places.
    value, place = np.concatenate(values), np.concatenate(places)
    order = np.lexsort((place, value))
    value, place = value[order], place[order]
    same = np.concatenate([[False], value[1:] == value[:-1]]) if len(value) else np.empty(0, bool)
    later = np.flatnonzero(same)
    group_starts = np.maximum.accumulate(np.where(same, 0, np.arange(len(value)))) if len(value) else later
    pairs = np.concatenate(
        [
            np.stack([place[later], place[later - 1]], axis=1),
            np.stack([place[later], place[group_starts[later]]], axis=1),
        ]
    )
    pairs = np.unique(pairs, axis=0)
    write_arrays(os.path.join(folder, ARRAYS), pairs=pairs)
    return {"pairs": len(pairs)}


def cut_substrings(
    folder: str, chunk: str, number: int, chunks: list[list[Any]], meetings: list[str], settings: dict[str, Any]
) -> dict[str, Any]:
    """One chunk without the spans that occurred before; `chunks` are (chunk, fingerprints, first byte) of all."""
    rules = from_mapping(SubstringSettings, settings, "substring")
    documents = list(documents_of(folder, chunk))
    contents = [substring.as_bytes(document.text) for document in documents]
    spans = _repeated_spans(folder, number, contents, chunks, meetings, rules.min_bytes)
    removed: Counter[str] = Counter()

    def kept() -> Iterator[Document | Dropped]:
        for document, mine in zip(documents, spans, strict=True):
            text, size = substring.cut(document.text, mine) if mine else (document.text, 0)
            if size:
                removed["spans"] += len(mine)
                removed["bytes"] += size
            if size and len(text.strip()) < rules.min_characters_left:
                yield Dropped(document.id, document.source, "substring", "repeated text", f"{size} bytes")
            else:
                yield msgspec.structs.replace(document, text=text) if size else document

    return {**write_chunk(folder, kept()), "removed": dict(removed)}


def _repeated_spans(
    folder: str,
    number: int,
    contents: list[npt.NDArray[np.uint8]],
    chunks: list[list[Any]],
    meetings: list[str],
    min_bytes: int,
) -> list[list[tuple[int, int]]]:
    """Verified spans of each document, in order and apart. One other chunk at a time is in memory."""
    firsts = np.array([first for *_, first in chunks], np.uint64)
    _, fingerprints, first = chunks[number]
    starts = ArrayFile(arrays_of(folder, fingerprints)).whole("starts")
    parts = []
    for key in meetings:
        file = ArrayFile(arrays_of(folder, key))
        low, high = (file.searchsorted_rows("pairs", edge) for edge in (first, first + int(starts[-1])))
        parts.append(file.rows("pairs", low, high))
    pairs = np.concatenate([np.empty((0, 2), np.uint64), *parts])
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    owners = np.searchsorted(firsts, pairs[:, 1], side="right") - 1
    found: list[list[tuple[int, int]]] = [[] for _ in contents]
    for owner in np.unique(owners).tolist():
        key, other_fingerprints, other_first = chunks[owner]
        others = contents if owner == number else [substring.as_bytes(d.text) for d in documents_of(folder, key)]
        other_starts = ArrayFile(arrays_of(folder, other_fingerprints)).whole("starts")
        chosen = pairs[owners == owner]
        place, earlier = chosen[:, 0] - np.uint64(first), chosen[:, 1] - np.uint64(other_first)
        mine = np.searchsorted(starts, place, side="right") - 1
        theirs = np.searchsorted(other_starts, earlier, side="right") - 1
        at, other_at = place - starts[mine], earlier - other_starts[theirs]
        for i, j, here, there in zip(mine.tolist(), theirs.tolist(), at.tolist(), other_at.tolist(), strict=True):
            if any(begin <= here and here + min_bytes <= end for begin, end in found[i][-1:]):
                continue
            same = owner == number and i == j
            begin, end = substring.shared_span(contents[i], here, others[j], there, same)
            if end - begin >= min_bytes:
                found[i].append((begin, end))
    return [_merged(spans) for spans in found]


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
