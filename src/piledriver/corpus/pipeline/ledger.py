"""The ledger: a Parquet file that names each dropped document, the stage, the reason and the document kept instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from piledriver.core import storage
from piledriver.core.errors import StorageError
from piledriver.corpus.pipeline.chunks import read_dropped
from piledriver.corpus.pipeline.stage_registry import StageOutcome

LEDGER = "ledger.parquet"
_COLUMNS = ("id", "source", "stage", "reason", "detail", "kept", "origin")


def write_ledger(out: str, outcomes: Sequence[StageOutcome]) -> dict[str, Any]:
    """Collect the drops of all stages, one row group for each chunk; return the ledger's line for the manifest."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = storage.join(out, LEDGER)
    schema = pa.schema([(name, pa.string()) for name in _COLUMNS])
    rows = 0
    with storage.atomic_write(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for outcome in outcomes:
            for _, result in outcome.results:
                dropped = list(read_dropped(result.folder))
                if dropped:
                    columns = {name: [getattr(entry, name) for entry in dropped] for name in _COLUMNS}
                    writer.write_table(pa.table(columns, schema=schema))
                    rows += len(dropped)
    return {"path": LEDGER, "rows": rows, "bytes": storage.size(path), "sha256": storage.sha256(path)}


def read_ledger(
    folder: storage.Location, *, source: str | None = None, stage: str | None = None, reason: str | None = None
) -> Iterator[dict[str, str]]:
    """Yield the rows of a corpus's ledger in order, one row group in memory at a time.

    `source` and `stage` select equal values, `reason` those that contain it.
    """
    import pyarrow.parquet as pq

    path = storage.join(folder, LEDGER)
    if not storage.exists(path):
        raise StorageError(f"{folder} has no {LEDGER}", fix="give the folder of a finished corpus")
    # Without threads: a thread pool that is still starting when the program ends aborts it.
    with storage.open_read(path) as file, pq.ParquetFile(file, pre_buffer=False) as ledger:
        for group in range(ledger.num_row_groups):
            for row in ledger.read_row_group(group, use_threads=False).to_pylist():
                if (
                    source in (None, row["source"])
                    and stage in (None, row["stage"])
                    and (reason is None or reason in row["reason"])
                ):
                    yield row
