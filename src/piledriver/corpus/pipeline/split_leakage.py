"""Does a document of one split say the same, or nearly the same, as one of another? The finished shards are the proof.

The check builds on nothing that the build has noted: it reads the published shards and goes through the same steps as
the stages `exact` and `near`, so it also holds for a corpus that others split.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import numpy as np

from piledriver.core import storage
from piledriver.corpus.dedup.arrays import ArrayFile
from piledriver.corpus.pipeline import stages
from piledriver.corpus.pipeline.catalogue import ARRAYS, Catalogue, catalogued
from piledriver.corpus.pipeline.chunks import Chunk, numbered
from piledriver.corpus.pipeline.dedup import read_chunks
from piledriver.corpus.pipeline.executors import executor
from piledriver.corpus.pipeline.manifest import load_manifest
from piledriver.corpus.pipeline.stage_settings import near_settings
from piledriver.corpus.pipeline.steps import ids_of

_ROWS_AT_ONCE = 1 << 20


def crossings(folder: str, *, workers: int = 1, memory_bytes: int = 2 << 30) -> Iterator[str]:
    """One line for each document that is alike one of another split. Works in a temporary folder."""
    splits: dict[str, list[str]] = {}
    for entry in load_manifest(folder).outputs:
        if "split" in entry:
            splits.setdefault(entry["split"], []).append(os.path.join(folder, *entry["path"].split("/")))
    with tempfile.TemporaryDirectory() as work, executor("local", work, workers) as opened:
        chunks: list[Chunk] = []
        begins = []
        # The smallest first: it is the first of each cluster, so that a row of the largest says what it is alike.
        names = sorted(splits, key=lambda name: (name == "train", name))
        for name in names:
            begins.append(sum(chunk.documents for chunk in chunks))
            chunks += read_chunks(opened, work, splits[name], [storage.sha256(path) for path in splits[name]]).chunks
        chunks = numbered(chunks)
        labels = ArrayFile(stages.alike(opened, chunks, near_settings({}), memory_bytes).path(ARRAYS))
        known = Catalogue(work, catalogued(opened, ((c.key, c.first, c.documents) for c in chunks)))
        for low in range(0, labels.count("clusters"), _ROWS_AT_ONCE):
            rows = labels.rows("clusters", low, low + _ROWS_AT_ONCE)
            split = np.searchsorted(np.array(begins, np.uint64), rows, side="right") - 1
            crossing = split[:, 0] != split[:, 1]
            ids = [ids_of(work, known, rows[crossing, column]) for column in (0, 1)]
            for one, two, (mine, other) in zip(*ids, split[crossing].tolist(), strict=True):
                yield f"{names[mine]}: document {one} is like {two} of {names[other]}"
