"""The mixture of the training split: how much of each source was asked for, in bytes or tokens, and how to get it.

Nothing is sampled: a source that is asked for 2.5 times goes in twice whole, and a third time with the documents whose
key is up to the threshold that gives half of its amount. Keys are pure functions of the seed and the document's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from piledriver.corpus.dedup.arrays import UInt64Array, open_array
from piledriver.corpus.pipeline.chunks import DocumentChunk
from piledriver.corpus.pipeline.recipe import Recipe, SourceEntry, source_name
from piledriver.corpus.pipeline.tasks import TaskResult

_BINS = 1 << 12


@dataclass(frozen=True)
class Share:
    """The part of one source in training: `full` whole copies, and documents with keys up to `threshold` once more."""

    unit: str
    """bytes or tokens."""
    asked: float
    got: int
    got_bytes: int
    full: int
    threshold: int

    def account(self) -> dict[str, Any]:
        """Return the figures for the manifest."""
        figures = {f"asked_{self.unit}": self.asked, f"got_{self.unit}": self.got}
        return figures | {"got_bytes": self.got_bytes}


def budget_unit(recipe: Recipe, entry: SourceEntry) -> str:
    """Return what a source's budget is counted in: bytes or tokens."""
    counted = entry.tokens is not None or (entry.weight is not None and recipe.total_tokens is not None)
    return "tokens" if counted else "bytes"


def compute_shares(recipe: Recipe, chunks: Sequence[DocumentChunk], measured: Sequence[TaskResult]) -> dict[str, Share]:
    """Return the share of each source, from the measured chunks."""
    shares = {}
    for entry in recipe.sources:
        unit = budget_unit(recipe, entry)
        mine = [result for chunk, result in zip(chunks, measured, strict=True) if chunk.source == source_name(entry)]
        folders = [result.folder for result in mine]
        size = sum(result.values[unit][0] for result in mine)
        asked = _asked(recipe, entry, size)
        full = int(asked // size) if size else 0
        threshold, extra = choose_threshold(folders, asked - full * size, unit) if size else (-1, 0)
        extra_bytes = extra if unit == "bytes" else sum(_bytes_up_to(folder, threshold) for folder in folders)
        whole_bytes = full * sum(result.values["bytes"][0] for result in mine)
        shares[source_name(entry)] = Share(unit, asked, full * size + extra, whole_bytes + extra_bytes, full, threshold)
    return shares


def _asked(recipe: Recipe, entry: SourceEntry, size: int) -> float:
    if entry.bytes is not None or entry.tokens is not None:
        return float(entry.bytes or entry.tokens or 0)
    if entry.weight is not None:
        total = recipe.total_bytes or recipe.total_tokens or 0
        return total * entry.weight / sum(other.weight or 0 for other in recipe.sources)
    return size * (1.0 if entry.epochs is None else entry.epochs)


def choose_threshold(folders: Sequence[str], wanted: float, unit: str) -> tuple[int, int]:
    """Return (threshold, amount) such that the documents with keys up to the threshold are nearest to what is wanted.

    Two passes over the chunks in bounded memory: amounts by bins of keys, then the keys of the bin that decides.
    """
    bins = np.zeros(_BINS, np.uint64)
    for choice, sizes in (_choices(folder, unit) for folder in folders):
        np.add.at(bins, (choice >> np.uint64(52)).astype(np.int64), sizes)
    before = np.concatenate([[0], np.cumsum(bins, dtype=np.uint64)]).astype(np.int64)
    deciding = int(np.clip(np.searchsorted(before, wanted, side="right") - 1, 0, _BINS - 1))
    keys, amounts = [], []
    for choice, sizes in (_choices(folder, unit) for folder in folders):
        mine = (choice >> np.uint64(52)) == deciding
        keys.append(choice[mine])
        amounts.append(sizes[mine])
    key, amount = np.concatenate(keys), np.concatenate(amounts)
    order = np.argsort(key, kind="stable")
    # Totals after taking zero, one, two, ... documents of the bin: the nearest to what is wanted wins.
    totals = int(before[deciding]) + np.concatenate([[0], np.cumsum(amount[order].astype(np.int64))])
    taken = int(np.abs(totals - wanted).argmin())
    threshold = int(key[order[taken - 1]]) if taken else (deciding << 52) - 1
    return threshold, int(totals[taken])


def _choices(folder: str, unit: str) -> tuple[UInt64Array, UInt64Array]:
    train = np.array(open_array(folder, "split")) == 0
    return open_array(folder, "choice")[train], open_array(folder, unit)[train]


def _bytes_up_to(folder: str, threshold: int) -> int:
    choice, sizes = _choices(folder, "bytes")
    return int(sizes[choice <= np.uint64(threshold)].sum()) if threshold >= 0 else 0
