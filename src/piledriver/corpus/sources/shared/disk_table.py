"""A temporary database on disk, so that a join over all raw files takes little memory."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self


class DiskTable:
    """An SQLite database in a temporary folder, deleted at the end of the `with` block."""

    def __init__(self, schema: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="piledriver-table-")
        self._table = sqlite3.connect(Path(self._folder.name) / "table.db", isolation_level=None)
        self._table.executescript(
            f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-262144; {schema}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._table.close()
        self._folder.cleanup()
