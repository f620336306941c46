"""Near-duplicate documents: MinHash-LSH with verified candidates. The steps are those of `dedup/near.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from piledriver.corpus.dedup import near
from piledriver.corpus.dedup.minhash import PRESETS, MinHashSettings
from piledriver.corpus.dedup.runs import hash_ranges
from piledriver.corpus.pipeline.catalogue import Catalogue, store_catalogue
from piledriver.corpus.pipeline.chunks import DocumentChunk, number_chunks, read_chunk_texts
from piledriver.corpus.pipeline.stage_registry import StageInput, StageOutcome
from piledriver.corpus.pipeline.stages.drop_duplicates import keep_first, label_clusters
from piledriver.corpus.pipeline.stages.exact import exact_edges
from piledriver.corpus.pipeline.tasks import Task, TaskResult, work_folder

# A group's signatures (480 bytes each by default) are held in memory while its bands are sorted. Large groups keep the
# number of files, and of reads from each, small.
_GROUP_DOCUMENTS, _GROUPS_VERIFIED = 1 << 18, 4


@dataclass(frozen=True, kw_only=True)
class Near:
    """Drop documents that are near-duplicates of an earlier one."""

    preset: Literal["piledriver", "datatrove", "pile"] = "piledriver"
    """The values of the settings below unless they are given, in this order in their help."""
    shingle_words: int | None = None
    """Words in a shingle (5, 5, 5)."""
    bands: int | None = None
    """Groups of hash values; texts that agree in all values of a group are compared (20, 14, 5)."""
    rows: int | None = None
    """Hash values in a group (6, 8, 2)."""
    check_values: int | None = None
    """Further hash values, for the estimated similarity alone (120, 0, 0)."""
    threshold: float | None = None
    """Compared texts are duplicates from this estimated similarity on; at 0 all of them are (0.75, 0, 0.5)."""

    def __post_init__(self) -> None:
        self.minhash()

    def minhash(self) -> MinHashSettings:
        """Return the preset's parameters, with those that are given."""
        given = {name: value for name, value in asdict(self).items() if name != "preset" and value is not None}
        return replace(PRESETS[self.preset], **given)

    def __call__(self, corpus: StageInput) -> StageOutcome:
        """Run the stage."""
        corpus = replace(corpus, chunks=number_chunks(corpus.chunks))
        edges, signatures = near_edges(corpus, self.minhash())
        labels = label_clusters(corpus.executor, edges, corpus.documents)
        return keep_first(corpus, "near", labels, signatures)


def duplicate_clusters(corpus: StageInput) -> TaskResult:
    """Return the finished task that holds the `clusters` of equal and nearly equal documents of numbered chunks.

    Nothing is dropped: the splits of a corpus are drawn by cluster.
    """
    edges, _ = near_edges(corpus, MinHashSettings())
    return label_clusters(corpus.executor, [*exact_edges(corpus), *edges], corpus.documents)


def near_edges(corpus: StageInput, minhash: MinHashSettings) -> tuple[Iterator[TaskResult], str]:
    """Return (tasks that hold the edges between near-duplicates, catalogue of signatures); the chunks are numbered."""
    executor, chunks = corpus.executor, corpus.chunks
    # Without the threshold, so that builds that differ in it share the other steps.
    settings = {name: value for name, value in asdict(minhash).items() if name != "threshold"}
    signed = executor.map(Task.call(sign_chunk, chunk=chunk.key, settings=settings) for chunk in chunks)
    runs = store_catalogue(
        executor, ((result.key, chunk.first, chunk.documents) for result, chunk in zip(signed, chunks, strict=True))
    )
    ranges = list(_chunk_groups(chunks, _GROUP_DOCUMENTS))
    banded = executor.map(
        Task.call(sort_group_bands, runs=runs, low=low, high=high, settings=settings) for low, high in ranges
    )
    groups = store_catalogue(
        executor,
        (
            (result.key, chunks[low].first, result.values["documents"])
            for result, (low, _) in zip(banded, ranges, strict=True)
        ),
    )
    found = executor.map(
        Task.call(find_band_candidates, groups=groups, band=band, low=low, high=high)
        for band in range(minhash.bands)
        for low, high in hash_ranges(corpus.documents, corpus.memory_bytes)
    )
    pairs = store_catalogue(executor, ((result.key, 0, result.values["pairs"]) for result in found))
    common = {"runs": runs, "groups": groups, "pairs": pairs, "threshold": minhash.threshold}
    verified = executor.map(
        Task.call(verify_group_candidates, low=low, high=min(low + _GROUPS_VERIFIED, len(ranges)), **common)
        for low in range(0, len(ranges), _GROUPS_VERIFIED)
    )
    return verified, runs


def _chunk_groups(chunks: list[DocumentChunk], most_documents: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of chunks with about so many documents."""
    low = 0
    for number, chunk in enumerate(chunks):
        if chunk.first + chunk.documents - chunks[low].first >= most_documents or number == len(chunks) - 1:
            yield low, number + 1
            low = number + 1


def sign_chunk(folder: str, chunk: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Write the signatures of a chunk (a task)."""
    texts = read_chunk_texts(folder, chunk)
    return {"documents": near.sign_texts(texts, MinHashSettings(**settings), folder)}


def sort_group_bands(folder: str, runs: str, low: int, high: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Write the sorted bands of the runs [low, high) (a task)."""
    group = list(Catalogue(work_folder(folder), runs).runs(low, high))
    return {"documents": near.sort_bands(group, MinHashSettings(**settings), folder)}


def find_band_candidates(folder: str, groups: str, band: int, low: int, high: int) -> dict[str, Any]:
    """Write the candidate pairs of one band with hashes in one range (a task)."""
    listed = Catalogue(work_folder(folder), groups).runs()
    return {"pairs": near.find_candidates(listed, band, (low, high), folder)}


def verify_group_candidates(
    folder: str, runs: str, groups: str, pairs: str, low: int, high: int, threshold: float
) -> dict[str, Any]:
    """Write the edges that begin in the groups [low, high) (a task)."""
    work = work_folder(folder)
    candidates = [run.folder for run in Catalogue(work, pairs).runs()]
    chosen = list(Catalogue(work, groups).runs(low, high))
    lookup = Catalogue(work, runs).lookup()
    return {"edges": near.verify_candidates(lookup, chosen, candidates, threshold, folder)}
