"""What is known of each document of a chunk without reading its text: id, size, licence, what was replaced in it.

A stage that only takes documents out copies lines and adds these up; it parses nothing that it keeps.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.corpus.dedup.arrays import ArrayFile, write_arrays
from piledriver.corpus.document import Document

INDEX = "index"


class ChunkIndex:
    """Collects the facts of documents, one after the other, and writes them."""

    def __init__(self) -> None:
        self._ids: list[bytes] = []
        self._sizes: list[int] = []
        self._licences: list[str] = []
        self._replaced: list[tuple[int, str, int]] = []

    def add(self, document: Document) -> None:
        """Note one document."""
        # What the pii filter took out of the documents that are still here.
        if isinstance(counts := document.meta.get("replaced"), dict):
            self._replaced += [(len(self._ids), kind, int(count)) for kind, count in counts.items()]
        self._ids.append(document.id.encode("utf-8", "replace"))
        text = document.text
        self._sizes.append(len(text) if text.isascii() else len(text.encode("utf-8", "replace")))
        self._licences.append(str(document.meta.get("licence", "unknown")))

    def write(self, folder: str) -> dict[str, Any]:
        """Write the file; returns the counts that the manifest adds up."""
        licences, licence = np.unique(np.array(self._licences, np.str_), return_inverse=True)
        kinds = sorted({kind for _, kind, _ in self._replaced})
        facts: dict[str, npt.NDArray[Any]] = {
            "id_bytes": np.frombuffer(b"".join(self._ids), np.uint8),
            "id_ends": np.cumsum([0, *map(len, self._ids)], dtype=np.int64),
            "sizes": np.array(self._sizes, np.int64),
            "licence": licence.astype(np.int32),
            "replaced": np.array([(at, kinds.index(kind), n) for at, kind, n in self._replaced], np.int64).reshape(
                -1, 3
            ),
        }
        return _written(folder, facts, [str(name) for name in licences], kinds)


def write_without(folder: str, chunk: str, gone: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Write the index of a chunk that has lost some documents; `chunk` is the folder that it comes from."""
    file = ArrayFile(os.path.join(chunk, INDEX))
    names = file.whole("names").tobytes().decode().split("\n")
    count = int(file.whole("name_counts")[0])
    ends, replaced = file.whole("id_ends"), file.whole("replaced")
    lengths = np.diff(ends)
    facts = {
        "id_bytes": file.whole("id_bytes")[np.repeat(~gone, lengths)],
        "id_ends": np.concatenate([[0], np.cumsum(lengths[~gone])]).astype(np.int64),
        "sizes": file.whole("sizes")[~gone],
        "licence": file.whole("licence")[~gone],
        "replaced": replaced[~gone[replaced[:, 0]]],
    }
    facts["replaced"][:, 0] = (np.cumsum(~gone) - 1)[facts["replaced"][:, 0]]
    return _written(folder, facts, names[:count], names[count:-1])


def ids(chunk: str, places: npt.NDArray[np.int64]) -> list[str]:
    """The ids of some documents by their places in the chunk."""
    file = ArrayFile(os.path.join(chunk, INDEX))
    if not len(places):
        return []
    begins, ends = file.take("id_ends", places), file.take("id_ends", places + 1)
    low = int(begins.min())
    blob = file.rows("id_bytes", low, int(ends.max())).tobytes()
    spans = zip((begins - low).tolist(), (ends - low).tolist(), strict=True)
    return [blob[begin:end].decode() for begin, end in spans]


def _written(folder: str, facts: dict[str, npt.NDArray[Any]], licences: list[str], kinds: list[str]) -> dict[str, Any]:
    # Names are free text of the input; a line break in one becomes a space.
    names = [" ".join(name.split("\n")) for name in (*licences, *kinds)]
    write_arrays(
        os.path.join(folder, INDEX),
        **facts,
        names=np.frombuffer("".join(f"{name}\n" for name in names).encode("utf-8", "replace"), np.uint8),
        name_counts=np.array([len(licences), len(kinds)], np.int64),
    )
    found = np.bincount(facts["licence"], minlength=len(licences)).tolist()
    replaced: Counter[str] = Counter()
    for _, kind, count in facts["replaced"].tolist():
        replaced[kinds[kind]] += count
    return {
        "documents": len(facts["sizes"]),
        "text_bytes": int(facts["sizes"].sum()),
        "licences": {name: count for name, count in zip(licences, found, strict=True) if count},
        "replaced": dict(replaced),
    }
