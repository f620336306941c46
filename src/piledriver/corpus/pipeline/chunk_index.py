"""Facts about each document of a chunk, beside its text: id, size, licence, what was replaced in it.

A stage that only drops documents copies lines and filters this index; it parses nothing that it keeps.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.core import storage
from piledriver.corpus.dedup.arrays import open_array, write_arrays
from piledriver.corpus.document import Document

_INDEX, _NAMES = "index", "names.json"
_DOCUMENT = np.dtype([("size", np.int64), ("licence", np.int64), ("id_end", np.int64)])


class ChunkIndex:
    """Collects the facts of consecutive documents."""

    def __init__(self) -> None:
        self._ids: list[bytes] = []
        self._sizes: list[int] = []
        self._licences: list[str] = []
        self._replaced: list[tuple[int, str, int]] = []

    def add(self, document: Document) -> None:
        """Add one document."""
        # What the pii filter replaced in the documents that are still here.
        if isinstance(counts := document.meta.get("replaced"), dict):
            self._replaced += [(len(self._ids), kind, int(count)) for kind, count in counts.items()]
        self._ids.append(document.id.encode("utf-8", "replace"))
        text = document.text
        self._sizes.append(len(text) if text.isascii() else len(text.encode("utf-8", "replace")))
        self._licences.append(str(document.meta.get("licence", "unknown")))

    def write(self, chunk: str) -> dict[str, Any]:
        """Write the index into the folder of a chunk; return the counts that the manifest adds up."""
        licences, licence = np.unique(np.array(self._licences, np.str_), return_inverse=True)
        kinds = sorted({kind for _, kind, _ in self._replaced})
        replaced = [(at, kinds.index(kind), count) for at, kind, count in self._replaced]
        documents = np.empty(len(self._ids), _DOCUMENT)
        documents["size"], documents["licence"] = self._sizes, licence
        documents["id_end"] = np.cumsum([len(id_) for id_ in self._ids], dtype=np.int64)
        facts: dict[str, npt.NDArray[Any]] = {
            "ids": np.frombuffer(b"".join(self._ids), np.uint8),
            "documents": documents,
            "replaced": np.array(replaced, np.int64).reshape(-1, 3),
        }
        return _write(chunk, facts, [str(name) for name in licences], kinds)


def write_filtered_index(chunk: str, source: str, dropped: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Write the index of a chunk that has lost some documents of the chunk in folder `source`; return its counts."""
    index = os.path.join(source, _INDEX)
    names = json.loads(storage.read_text(os.path.join(index, _NAMES)))
    documents, replaced = open_array(index, "documents"), open_array(index, "replaced")
    lengths = np.diff(documents["id_end"], prepend=0)
    kept, kept_replaced = np.array(documents[~dropped]), np.array(replaced[~dropped[replaced[:, 0]]])
    kept["id_end"] = np.cumsum(lengths[~dropped])
    kept_replaced[:, 0] = (np.cumsum(~dropped) - 1)[kept_replaced[:, 0]]
    ids = open_array(index, "ids")[np.repeat(~dropped, lengths)]
    facts = {"ids": ids, "documents": kept, "replaced": kept_replaced}
    return _write(chunk, facts, names["licences"], names["replaced"])


def document_ids(chunk: str, places: npt.NDArray[np.int64]) -> list[str]:
    """Return the ids of some documents by their places in the chunk."""
    if not len(places):
        return []
    index = os.path.join(chunk, _INDEX)
    all_ends = open_array(index, "documents")["id_end"]
    begins, ends = np.where(places > 0, all_ends[places - 1], 0), all_ends[places]
    low = int(begins.min())
    blob = open_array(index, "ids")[low : int(ends.max())].tobytes()
    spans = zip((begins - low).tolist(), (ends - low).tolist(), strict=True)
    return [blob[begin:end].decode() for begin, end in spans]


def _write(chunk: str, facts: dict[str, npt.NDArray[Any]], licences: list[str], kinds: list[str]) -> dict[str, Any]:
    index = os.path.join(chunk, _INDEX)
    write_arrays(index, **facts)
    names = {"licences": licences, "replaced": kinds}
    storage.write_text(os.path.join(index, _NAMES), json.dumps(names))
    documents = facts["documents"]
    found = np.bincount(documents["licence"], minlength=len(licences)).tolist()
    replaced: Counter[str] = Counter()
    for _, kind, count in facts["replaced"].tolist():
        replaced[kinds[kind]] += count
    return {
        "documents": len(documents),
        "text_bytes": int(documents["size"].sum()),
        "licences": {name: count for name, count in zip(licences, found, strict=True) if count},
        "replaced": dict(replaced),
    }
