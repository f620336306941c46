"""The facts that the card of a finished corpus shows, from its manifest, its ledger and some of its documents.

Counts are those of the manifest and complete. Lengths, languages and samples are of at most `read_documents` documents,
the same number from the beginning of each shard (shards are shuffled, so this is a fair sample).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from piledriver.core import storage
from piledriver.core.errors import MissingDependencyError
from piledriver.corpus.document import Document
from piledriver.corpus.pipeline.ledger import LEDGER, read_ledger
from piledriver.corpus.pipeline.manifest import Manifest, load_manifest
from piledriver.corpus.shards.reader import read_shards
from piledriver.corpus.text.language import language_of

SAMPLES_PER_SOURCE = 2
SAMPLE_CHARACTERS = 1200
_LANGUAGES_OF = 2000


@dataclass
class Composition:
    """The part of one source in the corpus."""

    documents: int = 0
    """Distinct documents after all stages."""
    text_bytes: int = 0
    train_bytes: int = 0
    """Bytes in training, repetitions included."""
    extracted: int = 0


@dataclass
class CardFacts:
    """Everything that a card shows."""

    manifest: Manifest
    composition: dict[str, Composition]
    splits: dict[str, int]
    """Documents of each split, repetitions included."""
    licences: dict[str, int]
    drops: dict[tuple[str, str], int]
    """(stage, reason) to documents."""
    taken_out: dict[str, Counter[str]]
    """Numbers of replacements, removals and hits inside documents, by stage."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Documents by the logarithm of their characters to base 2."""
    languages: Counter[str] = field(default_factory=Counter)
    clusters: Counter[int] = field(default_factory=Counter)
    """Near-duplicate clusters by number of documents."""
    largest_clusters: list[tuple[str, int]] = field(default_factory=list)
    """(id of the kept document, documents)."""
    samples: dict[str, list[Document]] = field(default_factory=dict)
    documents_read: int = 0


def card_facts(folder: storage.Location, *, read_documents: int = 100_000) -> CardFacts:
    """Collect the facts of a finished corpus."""
    manifest = load_manifest(folder)
    drops: Counter[tuple[str, str]] = Counter()
    taken_out: dict[str, Counter[str]] = defaultdict(Counter)
    for stage in manifest.stages:
        for account in stage["sources"].values():
            for name, count in account["dropped"].items():
                use, _, reason = name.partition(": ")
                drops[use, reason] += count
            for kind in ("removed", "hits"):
                for name, count in account.get(kind, {}).items():
                    # A file of evaluation texts is one row: the texts are named file#number.
                    taken_out[f"{stage['stage']}: {kind}"][name.rpartition("#")[0] or name] += count
    for account in _last(manifest).values():
        for name, count in account.get("replaced", {}).items():
            taken_out["pii: replaced"][name] += count
    facts = CardFacts(
        manifest=manifest,
        composition=_composition(manifest),
        splits=_splits(manifest),
        licences=_licences(manifest),
        drops=dict(drops),
        taken_out=taken_out,
    )
    _read_clusters(folder, facts)
    _read_documents(folder, facts, read_documents)
    return facts


def _last(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return each source's account at the last stage that reported it; a stage may be for some sources only."""
    accounts: dict[str, dict[str, Any]] = {}
    for stage in manifest.stages:
        accounts.update(stage["sources"])
    return accounts


def _composition(manifest: Manifest) -> dict[str, Composition]:
    extracted = manifest.stages[0]["sources"] if manifest.stages else {}
    found = {
        name: Composition(
            account["documents"],
            account["text_bytes"],
            manifest.mix.get(name, {}).get("got_bytes", account["text_bytes"]),
            extracted.get(name, account)["documents"],
        )
        for name, account in _last(manifest).items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1].train_bytes))


def _splits(manifest: Manifest) -> dict[str, int]:
    splits: Counter[str] = Counter()
    for entry in manifest.outputs:
        if "split" in entry:
            splits[entry["split"]] += entry["documents"]
    return splits


def _licences(manifest: Manifest) -> dict[str, int]:
    licences: Counter[str] = Counter()
    for account in _last(manifest).values():
        licences.update(account["licences"])
    return dict(licences.most_common())


def _read_clusters(folder: storage.Location, facts: CardFacts) -> None:
    if not storage.exists(storage.join(folder, LEDGER)):
        return
    sizes = Counter(row["kept"] for row in read_ledger(folder, stage="near"))
    # The kept document belongs to its cluster, too.
    facts.clusters = Counter(count + 1 for count in sizes.values())
    facts.largest_clusters = [(kept, count + 1) for kept, count in sizes.most_common(10)]


def _read_documents(folder: storage.Location, facts: CardFacts, most: int) -> None:
    shards = [entry["path"] for entry in facts.manifest.outputs if "split" in entry]
    each = max(1, most // max(1, len(shards)))
    for name in shards:
        for document in islice(read_shards(storage.join(folder, *name.split("/"))), each):
            facts.documents_read += 1
            facts.lengths[max(0, len(document.text).bit_length() - 1)] += 1
            samples = facts.samples.setdefault(document.source, [])
            if len(samples) < SAMPLES_PER_SOURCE and document.id not in {known.id for known in samples}:
                samples.append(document)
            if facts.documents_read <= _LANGUAGES_OF:
                facts.languages[_language(document)] += 1


def _language(document: Document) -> str:
    if "language" in document.meta:
        return str(document.meta["language"])
    try:
        return language_of(document.text) or "unknown"
    except MissingDependencyError:
        return "unknown"


@dataclass
class SourceCount:
    """The counts of one source."""

    documents: int = 0
    text_bytes: int = 0
    licences: Counter[str] = field(default_factory=Counter)


def count_sources(*locations: storage.Location) -> dict[str, SourceCount]:
    """Return the counts of all sources in some shards, largest first."""
    counts: dict[str, SourceCount] = {}
    for document in read_shards(*locations):
        counted = counts.setdefault(document.source or "(no source)", SourceCount())
        counted.documents += 1
        counted.text_bytes += len(document.text.encode("utf-8", "replace"))
        counted.licences[str(document.meta.get("licence", "unknown"))] += 1
    return dict(sorted(counts.items(), key=lambda item: -item[1].text_bytes))
