"""The ledger: every dropped document, at which stage, why, and which was kept in its place, in one Parquet file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from piledriver.core import storage
from piledriver.corpus.pipeline.chunks import DROPPED, read_dropped
from piledriver.corpus.pipeline.ledger_reader import LEDGER
from piledriver.corpus.pipeline.stages import StageOutcome
from piledriver.corpus.pipeline.tasks import task_folder

_COLUMNS = ("id", "source", "stage", "reason", "detail", "kept", "origin")
_SCHEMA = pa.schema([(name, pa.string()) for name in _COLUMNS])


def write_ledger(out: str, work: str, outcomes: Sequence[StageOutcome]) -> dict[str, Any]:
    """Collect the drops of every chunk of every stage, one row group a chunk; returns its line for the manifest."""
    path = os.path.join(out, LEDGER)
    rows = 0
    with storage.atomic_write(path) as file, pq.ParquetWriter(file, _SCHEMA, compression="zstd") as writer:
        for outcome in outcomes:
            for key in outcome.keys:
                dropped = list(read_dropped(os.path.join(task_folder(work, key), DROPPED)))
                if dropped:
                    columns = [[getattr(entry, name) for entry in dropped] for name in _COLUMNS]
                    writer.write_table(pa.table(dict(zip(_COLUMNS, columns, strict=True)), schema=_SCHEMA))
                    rows += len(dropped)
    return {"path": LEDGER, "rows": rows, "bytes": storage.size(path), "sha256": storage.sha256(path)}
