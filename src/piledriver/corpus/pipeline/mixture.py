"""How much of each source goes into the training split: what was asked for, in bytes or tokens, and what that gives.

Nothing is sampled with luck: a source that is asked for 2.5 times goes in twice whole, and a third time with those
documents whose key is under the threshold that gives half of its amount. Keys are pure functions of the seed and the
document's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.corpus.dedup.arrays import ArrayFile
from piledriver.corpus.pipeline.catalogue import ARRAYS
from piledriver.corpus.pipeline.chunks import Chunk
from piledriver.corpus.pipeline.recipe import Recipe, SourceEntry, source_name
from piledriver.corpus.pipeline.tasks import Done

UInt64Array = npt.NDArray[np.uint64]
_BINS = 1 << 12


@dataclass(frozen=True)
class Share:
    """Of one source: `full` whole copies, and documents with keys up to `threshold` once more."""

    unit: str
    """bytes or tokens."""
    asked: float
    got: int
    got_bytes: int
    full: int
    threshold: int

    def account(self) -> dict[str, Any]:
        """For the manifest."""
        figures = {f"asked_{self.unit}": self.asked, f"got_{self.unit}": self.got}
        return figures | {"got_bytes": self.got_bytes}


def unit_of(recipe: Recipe, entry: SourceEntry) -> str:
    """What a source's budget is counted in."""
    counted = entry.tokens is not None or (entry.weight is not None and recipe.total_tokens is not None)
    return "tokens" if counted else "bytes"


def shares(recipe: Recipe, chunks: Sequence[Chunk], measured: Sequence[Done]) -> dict[str, Share]:
    """What each source was asked for and gets, of the documents that were measured."""
    found = {}
    for entry in recipe.sources:
        unit = unit_of(recipe, entry)
        mine = [done for chunk, done in zip(chunks, measured, strict=True) if chunk.source == source_name(entry)]
        files = [done.path(ARRAYS) for done in mine]
        size = sum(done.result[unit][0] for done in mine)
        asked = _asked(recipe, entry, size)
        full = int(asked // size) if size else 0
        threshold, extra = choose(files, asked - full * size, unit) if size else (-1, 0)
        extra_bytes = extra if unit == "bytes" else sum(_bytes_up_to(path, threshold) for path in files)
        whole_bytes = full * sum(done.result["bytes"][0] for done in mine)
        found[source_name(entry)] = Share(unit, asked, full * size + extra, whole_bytes + extra_bytes, full, threshold)
    return found


def _asked(recipe: Recipe, entry: SourceEntry, size: int) -> float:
    if entry.bytes is not None or entry.tokens is not None:
        return float(entry.bytes or entry.tokens or 0)
    if entry.weight is not None:
        total = recipe.total_bytes or recipe.total_tokens or 0
        return total * entry.weight / sum(other.weight or 0 for other in recipe.sources)
    return size * (1.0 if entry.epochs is None else entry.epochs)


def choose(files: Sequence[str], wanted: float, unit: str) -> tuple[int, int]:
    """(threshold, amount): the documents with keys up to the threshold have as nearly what is wanted as can be.

    Two passes over the files in bounded memory: amounts by bins of keys, then the keys of the one bin that decides.
    """
    bins = np.zeros(_BINS, np.uint64)
    for choice, sizes in (_choices(path, unit) for path in files):
        np.add.at(bins, (choice >> np.uint64(52)).astype(np.int64), sizes)
    before = np.concatenate([[0], np.cumsum(bins, dtype=np.uint64)]).astype(np.int64)
    deciding = int(np.clip(np.searchsorted(before, wanted, side="right") - 1, 0, _BINS - 1))
    keys, amounts = [], []
    for choice, sizes in (_choices(path, unit) for path in files):
        mine = (choice >> np.uint64(52)) == deciding
        keys.append(choice[mine])
        amounts.append(sizes[mine])
    key, amount = np.concatenate(keys), np.concatenate(amounts)
    order = np.argsort(key, kind="stable")
    # Totals after taking none, one, two, ... documents of the bin: the nearest to what is wanted wins.
    totals = int(before[deciding]) + np.concatenate([[0], np.cumsum(amount[order].astype(np.int64))])
    taken = int(np.abs(totals - wanted).argmin())
    threshold = int(key[order[taken - 1]]) if taken else (deciding << 52) - 1
    return threshold, int(totals[taken])


def _choices(path: str, unit: str) -> tuple[UInt64Array, UInt64Array]:
    file = ArrayFile(path)
    train = file.whole("split") == 0
    return file.whole("choice")[train], file.whole(unit)[train]


def _bytes_up_to(path: str, threshold: int) -> int:
    choice, sizes = _choices(path, "bytes")
    return int(sizes[choice <= np.uint64(threshold)].sum()) if threshold >= 0 else 0
