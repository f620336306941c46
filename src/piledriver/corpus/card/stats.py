"""Count documents, bytes and licences of shards by source."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from piledriver.core import storage
from piledriver.corpus.shards.reader import read_shards


@dataclass
class SourceCount:
    """The counts of one source."""

    documents: int = 0
    text_bytes: int = 0
    licences: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {"documents": self.documents, "text_bytes": self.text_bytes, "licences": dict(self.licences)}


def count_sources(*locations: storage.Location) -> dict[str, SourceCount]:
    """Return the counts of all sources in some shards, largest first."""
    counts: dict[str, SourceCount] = {}
    for document in read_shards(*locations):
        counted = counts.setdefault(document.source or "(no source)", SourceCount())
        counted.documents += 1
        counted.text_bytes += len(document.text.encode("utf-8", "replace"))
        counted.licences[str(document.meta.get("licence", "unknown"))] += 1
    return dict(sorted(counts.items(), key=lambda item: -item[1].text_bytes))
