"""Read a corpus's ledger: which documents were dropped, at which stage and why."""

from __future__ import annotations

from collections.abc import Iterator

from piledriver.core import storage
from piledriver.core.errors import StorageError

LEDGER = "ledger.parquet"


def read_ledger(
    folder: storage.Location, *, source: str | None = None, stage: str | None = None, reason: str | None = None
) -> Iterator[dict[str, str]]:
    """The ledger's rows in order, those that fit; `reason` may be a part of the reason. One row group at a time."""
    import pyarrow.parquet as pq

    path = storage.join(folder, LEDGER)
    if not storage.exists(path):
        raise StorageError(f"{folder} has no {LEDGER}", fix="give the folder of a corpus that was built to its end")
    # In this thread: a pool of threads for a small file may still be starting when the program ends, and abort it.
    with storage.open_read(path) as file, pq.ParquetFile(file, pre_buffer=False) as ledger:
        for group in range(ledger.num_row_groups):
            for row in ledger.read_row_group(group, use_threads=False).to_pylist():
                if (
                    source in (None, row["source"])
                    and stage in (None, row["stage"])
                    and (reason is None or reason in row["reason"])
                ):
                    yield row
