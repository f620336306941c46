"""What the tasks do to parts of documents: evaluation text, repeated paragraphs.

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

from piledriver.core import storage
from piledriver.core.config import from_mapping
from piledriver.core.errors import PiledriverError
from piledriver.corpus.dedup import contamination
from piledriver.corpus.dedup.arrays import ArrayFile, write_arrays
from piledriver.corpus.dedup.contamination import DecontaminationSettings
from piledriver.corpus.dedup.paragraphs import ParagraphSettings, units, without
from piledriver.corpus.document import Document, document_id
from piledriver.corpus.pipeline.catalogue import ARRAYS, Catalogue
from piledriver.corpus.pipeline.chunks import LEVEL, Dropped, chunk_documents, write_chunk
from piledriver.corpus.pipeline.steps import arrays_of, repeated
from piledriver.corpus.pipeline.tasks import task_folder, work_of
from piledriver.corpus.shards.reader import read_texts

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
        for document in chunk_documents(work_of(folder), chunk):
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
    found = [
        hashed
        for document in chunk_documents(work_of(folder), chunk)
        for *_, hashed in units(document.text, rules)
        if hashed
    ]
    pairs = np.array(found, np.uint64).reshape(-1, 2)
    order = np.argsort(pairs[:, 0], kind="stable")
    write_arrays(
        os.path.join(folder, ARRAYS),
        hashes=pairs[order, 0],
        checks=pairs[order, 1],
        documents=order.astype(np.uint64),
    )
    return {"units": len(pairs)}


def repeated_paragraphs(folder: str, runs: str, low: int, high: int) -> dict[str, Any]:
    """The ordinals of the units in one range of hashes that are not the first of their kind."""
    _, later = repeated(folder, runs, low, high)
    write_arrays(os.path.join(folder, ARRAYS), repeated=np.sort(later))
    return {"repeated": len(later)}


def drop_paragraphs(
    folder: str, chunk: str, first: int, count: int, ranges: str, settings: dict[str, Any], level: int = LEVEL
) -> dict[str, Any]:
    """One chunk without its repeated units; `first` is the ordinal of its first unit."""
    rules = from_mapping(ParagraphSettings, settings, "paragraphs")
    gone: set[int] = set()
    for run in Catalogue(work_of(folder), ranges).runs():
        file = ArrayFile(run.path)
        low, high = (file.position("repeated", edge) for edge in (first, first + count))
        gone.update(file.rows("repeated", low, high).tolist())
    removed: Counter[str] = Counter()

    def kept() -> Iterator[Document | Dropped]:
        at = first
        for document in chunk_documents(work_of(folder), chunk):
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

    return {**write_chunk(folder, kept(), level), "removed": dict(removed)}
