"""Gopher quality and repetition, C4 and FineWeb rules together: CPU milliseconds a document, against datatrove's.

    python benchmarks/filters.py [--documents 3000]

Both judge the same documents, each with all four filters (none is skipped after a drop), and the verdicts are compared
filter by filter. datatrove judges the first 150 of them only: it takes its time.
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
    return [d.text[at : at + 5400] for d in read_shards(REAL_TEXT) for at in range(0, len(d.text), 5400)][::7]


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
    count = parser.parse_args().documents
    found, real = list(islice(pieces(), count)), prose()
    texts = [text for pair in zip(real, found, strict=False) for text in pair][:count] or found
    verdicts, milliseconds = ours(texts)
    row = {
        "row": "Gopher, repetition, C4 and FineWeb rules, ms a document, one core",
        "documents": len(texts),
        "mean_bytes": round(sum(len(text.encode()) for text in texts) / len(texts)),
        "ours": round(milliseconds, 3),
        "limit": 0.5,
    }
    try:
        peer_verdicts, peer_milliseconds = theirs(texts[:PEER_DOCUMENTS])
    except ImportError as error:
        row["peer"] = f"datatrove not run: {error}"
    else:
        row["peer"] = round(peer_milliseconds, 2)
        row["ratio"] = round(peer_milliseconds / milliseconds, 1)
        row["agreement"] = {
            name: round(
                sum(a[i] == b[i] for a, b in zip(verdicts, peer_verdicts, strict=False)) / len(peer_verdicts), 3
            )
            for i, name in enumerate(NAMES)
        }
        row["kept_by_theirs"] = {name: sum(b[i] for b in peer_verdicts) for i, name in enumerate(NAMES)}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
