"""Every source's extraction against what the original Pile used for its format, side by side on one core.

Ours is the whole of an extraction but the writing of the shard: open, cut into pieces, parse, normalise, name. The peer
(`source_peers/<slug>.py`) gets the bytes in memory and gives back text. CPU time counts, with that of child processes
(pandoc is one); the best of several turns of each, taken in alternation, so that a busy moment of the machine hurts
both. A turn is as many passes over the samples as fill a fifth of a second: one pass over a few small files would
measure how cold the caches are after the other side's turn. The similarity is the F1 of the words of the two texts: low
where the original kept boilerplate or lost text.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import os
import re
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.extraction import extract_piece, find_pieces
from piledriver.corpus.sources import SOURCES
from piledriver.corpus.sources.base import COMPILE_FROM_BYTES, Source
from piledriver.corpus.sources.table import BUILT_IN

SAMPLES = Path(__file__).resolve().parents[2] / "shared" / "raw-samples"
GOAL = 5
MIN_TURNS, MAX_TURNS = 3, 40
TURN_SECONDS = 0.2
_WORD = re.compile(r"\w+")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(BUILT_IN), default=list(BUILT_IN), metavar="SLUG")
    parser.add_argument("--seconds", type=float, default=4, help="for each source, about; every side gets three turns")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    warnings.simplefilter("ignore")
    logging.disable()
    results = {slug: measured(slug, arguments.seconds) for slug in arguments.only}
    row: dict[str, Any] = {
        "row": "sources",
        "unit": "MB of raw files per CPU-second on one core; similarity: F1 of the words of the two texts",
        "goal": f"ratio >= {GOAL} where the peer is pure Python or pandoc",
    }
    for part in ("ours", "peer", "ratio", "similarity"):
        row[part] = {slug: result.get(part) for slug, result in results.items()}
    row["peers"] = {slug: result["about"] for slug, result in results.items() if "about" in result}
    row["not_measured"] = {slug: result["why"] for slug, result in results.items() if "why" in result}
    row["python"] = sys.version.split()[0]
    print(json.dumps(row))


def measured(slug: str, seconds: float) -> dict[str, Any]:
    """The figures of one source, or why there are none."""
    try:
        peer = importlib.import_module(f"source_peers.{slug.replace('-', '_')}")
    except ModuleNotFoundError:
        return {"why": "no peer: the original used no library for this format, or did not have it"}
    cases = raw_cases(peer)
    if not cases:
        return {"why": "no sample in ../shared/raw-samples"}
    with tempfile.TemporaryDirectory() as name:
        paths, contents = [], []
        for case, (content, file_name, ours) in enumerate(cases):
            folder = Path(name) / str(case)
            folder.mkdir()
            (folder / file_name).write_bytes(ours)
            paths.append(str(folder / file_name))
            contents.append(content)
        try:
            # What it prints must not come between the figures.
            with contextlib.redirect_stdout(io.StringIO()):
                return compared(SOURCES[slug], paths, contents, peer.peer, seconds) | {"about": about(peer)}
        except (ImportError, OSError) as error:
            return {"why": f"the peer does not run here: {type(error).__name__}: {error}"[:200]}


def raw_cases(peer: ModuleType) -> list[tuple[bytes, str, bytes]]:
    """(what the peer is given, the name and content of the file that our source is given): mostly the same bytes."""
    found = [(SAMPLES / case).name for case in peer.CASES if (SAMPLES / case).exists()]
    contents = [(SAMPLES / case).read_bytes() for case in peer.CASES if (SAMPLES / case).exists()]
    if hasattr(peer, "made"):
        for name, content in peer.made().items():
            found.append(name)
            contents.append(content)
    as_distributed: Callable[[str, bytes], tuple[str, bytes]] = getattr(peer, "as_distributed", lambda *case: case)
    return [(content, *as_distributed(name, content)) for name, content in zip(found, contents, strict=True)]


def about(peer: ModuleType) -> str:
    return (peer.__doc__ or "").strip().split("\n")[0]


def compared(
    source: Source, paths: list[str], contents: list[bytes], peer: Callable[[bytes], str], seconds: float
) -> dict[str, Any]:
    # As for a corpus: compiling once for all of it is no part of the speed of a file.
    source = source.prepared(COMPILE_FROM_BYTES)

    def ours() -> str:
        return "\n\n".join(extracted(source, paths))

    def theirs() -> str:
        return "\n\n".join(peer(content) for content in contents)

    our_text, their_text = ours(), theirs()
    our_passes, their_passes = (passes_in_a_turn(side) for side in (ours, theirs))
    our_times: list[float] = []
    their_times: list[float] = []
    begun = time.perf_counter()
    while len(our_times) < MIN_TURNS or (time.perf_counter() - begun < seconds and len(our_times) < MAX_TURNS):
        our_times.append(cpu_seconds(ours, our_passes))
        their_times.append(cpu_seconds(theirs, their_passes))
    megabytes = sum(map(len, contents)) / 1e6
    return {
        "ours": round(megabytes / min(our_times), 2),
        "peer": round(megabytes / min(their_times), 2),
        "ratio": round(min(their_times) / min(our_times), 1),
        "similarity": round(word_f1(our_text, their_text), 3),
    }


def extracted(source: Source, paths: list[str]) -> list[str]:
    texts = []
    for piece in find_pieces(source, paths):
        if not isinstance(piece, Refusal):
            texts += [found.text for found in extract_piece(source, piece) if isinstance(found, Document)]
    return texts


def passes_in_a_turn(work: Callable[[], Any]) -> int:
    return max(1, round(TURN_SECONDS / max(cpu_seconds(work), 1e-6)))


def cpu_seconds(work: Callable[[], Any], passes: int = 1) -> float:
    """CPU time of one pass, the mean of those that follow each other."""
    before = _used()
    for _ in range(passes):
        work()
    return (_used() - before) / passes


def _used() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def word_f1(first: str, second: str) -> float:
    """F1 of the words of two texts, each counted as often as it stands there."""
    one, other = (Counter(_WORD.findall(text.lower())) for text in (first, second))
    total = one.total() + other.total()
    return 2 * (one & other).total() / total if total else 1.0


if __name__ == "__main__":
    main()
