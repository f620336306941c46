"""Split leakage: find documents of one split that equal or nearly equal a document of another.

The check reads the published shards alone and runs the steps of the stages `exact` and `near`, so it does not rely on
what the build recorded, and works for a corpus that another program has split.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import numpy as np

from piledriver.core import storage
from piledriver.corpus.dedup.arrays import open_array
from piledriver.corpus.pipeline.catalogue import Catalogue, store_catalogue
from piledriver.corpus.pipeline.chunks import DocumentChunk, number_chunks
from piledriver.corpus.pipeline.deduplicate import read_shards_as_chunks
from piledriver.corpus.pipeline.executors import open_executor
from piledriver.corpus.pipeline.manifest import load_manifest
from piledriver.corpus.pipeline.stage_registry import StageInput
from piledriver.corpus.pipeline.stages.drop_duplicates import ids_of
from piledriver.corpus.pipeline.stages.near import duplicate_clusters

_ROWS_AT_ONCE = 1 << 20


def find_split_leakage(folder: str, *, workers: int = 1, memory_bytes: int = 2 << 30) -> Iterator[str]:
    """Yield one line for each document that duplicates one of another split. Works in a temporary folder."""
    splits: dict[str, list[str]] = {}
    for entry in load_manifest(folder).outputs:
        if "split" in entry:
            splits.setdefault(entry["split"], []).append(os.path.join(folder, *entry["path"].split("/")))
    with tempfile.TemporaryDirectory() as work, open_executor("local", work, workers) as executor:
        chunks: list[DocumentChunk] = []
        begins = []
        # Training last: the first document of a cluster is then a held-out one, and each training copy gets a line.
        names = sorted(splits, key=lambda name: (name == "train", name))
        for name in names:
            begins.append(sum(chunk.documents for chunk in chunks))
            checksums = [storage.sha256(path) for path in splits[name]]
            chunks += read_shards_as_chunks(executor, work, splits[name], checksums).chunks
        chunks = number_chunks(chunks)
        clusters = open_array(duplicate_clusters(StageInput(executor, chunks, memory_bytes)).folder, "clusters")
        listed = store_catalogue(executor, ((chunk.key, chunk.first, chunk.documents) for chunk in chunks))
        catalogue = Catalogue(work, listed)
        for low in range(0, len(clusters), _ROWS_AT_ONCE):
            rows = np.array(clusters[low : low + _ROWS_AT_ONCE])
            split = np.searchsorted(np.array(begins, np.uint64), rows, side="right") - 1
            crossing = split[:, 0] != split[:, 1]
            ids = [ids_of(work, catalogue, rows[crossing, column]) for column in (0, 1)]
            for one, two, (mine, other) in zip(*ids, split[crossing].tolist(), strict=True):
                yield f"{names[mine]}: document {one} is like {two} of {names[other]}"
