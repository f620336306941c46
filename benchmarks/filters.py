"""Gopher quality and repetition, C4 and FineWeb rules together: CPU milliseconds a document, against datatrove's.

    python benchmarks/filters.py [--documents 3000]

Both judge the same documents, each with all four filters (none is skipped after a drop), and the verdicts are compared
filter by filter, on prose and on code apart. datatrove judges 150 of each only: it takes its time. The prose is books,
law, parliament and others from `../shared/text`, in pieces.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path

from corpus_texts import pieces

from piledriver.corpus import Document, read_shards
from piledriver.corpus.filters import FILTERS, Drop

NAMES = ("gopher-quality", "gopher-repetition", "c4", "fineweb")
REAL_TEXT = Path(__file__).resolve().parents[2] / "shared" / "text"
PEER_DOCUMENTS = 150


def prose() -> list[str]:
    """Pieces of real prose where there is some: on code alone every rule says no."""
    if not REAL_TEXT.exists():
        return []
    long = (d.text for d in read_shards(REAL_TEXT) if "code" not in d.source.lower())
    return [text[at : at + 5400] for text in long for at in range(0, len(text) - 2700, 5400)][::7]


def ours(texts: list[str]) -> tuple[list[list[bool]], float]:
    judges = [FILTERS[name]() for name in NAMES]
    for judge in judges:
        judge(Document("One text to compile for. " * 20))
    start = time.process_time()
    verdicts = [[not isinstance(judge(Document(text)), Drop) for judge in judges] for text in texts]
    return verdicts, (time.process_time() - start) / len(texts) * 1e3


def theirs(texts: list[str]) -> tuple[list[list[bool]], float]:
    from datatrove.data import Document as TheirDocument
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.utils.logging import logger

    logger.remove()
    judges = [GopherQualityFilter(), GopherRepetitionFilter(), C4QualityFilter(), FineWebQualityFilter()]

    def kept(judge: object, text: str) -> bool:
        verdict = judge.filter(TheirDocument(text=text, id="0"))
        return verdict is True

    for judge in judges:
        kept(judge, "One text to load the word splitter for. " * 20)
    start = time.process_time()
    verdicts = [[kept(judge, text) for judge in judges] for text in texts]
    return verdicts, (time.process_time() - start) / len(texts) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=3000)
    half = parser.parse_args().documents // 2
    sets = {"prose": prose()[:half], "code": list(islice(pieces(), half))}
    texts = [text for some in sets.values() for text in some]
    row: dict = {
        "row": "Gopher, repetition, C4 and FineWeb rules, ms a document, one core",
        "documents": len(texts),
        "mean_bytes": round(sum(len(text.encode()) for text in texts) / len(texts)),
        "ours": round(ours(texts)[1], 3),
        "limit": 0.5,
    }
    peer: list[float] = []
    for kind, some in sets.items():
        verdicts = ours(some)[0]
        row[kind] = {"documents": len(some), "kept": kept(verdicts)}
        try:
            peer_verdicts, milliseconds = theirs(some[:PEER_DOCUMENTS])
        except ImportError as error:
            row["peer"] = f"datatrove not run: {error}"
            continue
        peer.append(milliseconds)
        both = list(zip(verdicts, peer_verdicts, strict=False))
        row[kind] |= {
            "kept_of_the_first": kept(verdicts[:PEER_DOCUMENTS]),
            "kept_by_theirs": kept(peer_verdicts),
            "agreement": {
                name: round(sum(a[i] == b[i] for a, b in both) / max(1, len(both)), 3) for i, name in enumerate(NAMES)
            },
        }
    if peer:
        row["peer"] = round(sum(peer) / len(peer), 2)
        row["ratio"] = round(row["peer"] / row["ours"], 1)
    print(json.dumps(row))


def kept(verdicts: list[list[bool]]) -> dict[str, int]:
    return {name: sum(verdict[i] for verdict in verdicts) for i, name in enumerate(NAMES)}


if __name__ == "__main__":
    main()
