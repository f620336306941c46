"""The card as one self-contained HTML page, without scripts, fonts or images from elsewhere.

Every text of the corpus is escaped; the page also forbids scripts and loads by its content security policy.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from itertools import pairwise
from typing import Any

from piledriver.corpus.card.facts import SAMPLE_CHARACTERS, CardFacts
from piledriver.corpus.document import Document

Row = tuple[str, float, str]


def card_page(facts: CardFacts) -> str:
    """Return the page."""
    template = (resources.files("piledriver.corpus.card") / "page.html").read_text(encoding="utf-8")
    title = escape(facts.manifest.name)
    values = {"TITLE": title, "SUMMARY": _summary(facts), "SECTIONS": "\n".join(_sections(facts))}
    # One pass over the template: marks in the text of a document are not replaced.
    return re.sub(r"<!--([A-Z]+)-->", lambda mark: values[mark.group(1)], template)


def _summary(facts: CardFacts) -> str:
    figures = [
        ("documents", f"{sum(facts.splits.values()):,}"),
        ("bytes in training", _size(sum(part.train_bytes for part in facts.composition.values()))),
        ("sources", str(len(facts.composition))),
        ("raw files", f"{len(facts.manifest.inputs):,}"),
        ("dropped", f"{sum(facts.drops.values()):,}"),
    ]
    return "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in figures)


def _sections(facts: CardFacts) -> Iterable[str]:
    parts = facts.composition
    yield _section(
        "Composition",
        "Bytes of text in training, repetitions included.",
        _bars([(name, part.train_bytes, _size(part.train_bytes)) for name, part in parts.items()])
        + _table(
            ("source", "found", "kept", "text", "in training"),
            [(n, p.extracted, p.documents, _size(p.text_bytes), _size(p.train_bytes)) for n, p in parts.items()],
        ),
    )
    yield _section("Splits", "Documents.", _bars([(n, c, f"{c:,}") for n, c in facts.splits.items()]))
    if facts.lengths:
        span = range(min(facts.lengths), max(facts.lengths) + 1)
        rows = [(f"{1 << power:,} to {(2 << power) - 1:,}", facts.lengths[power]) for power in span]
        yield _section(
            "Document lengths",
            f"Characters, of {facts.documents_read:,} documents read.",
            _bars([(name, count, f"{count:,}") for name, count in rows]),
        )
    if facts.languages:
        total = sum(facts.languages.values())
        rows_of = [(name, count, f"{100 * count / total:.1f} %") for name, count in facts.languages.most_common(15)]
        yield _section("Languages", f"By meta or detector, of {total:,} documents.", _bars(rows_of))
    yield _section(
        "Licences",
        "By the licence that each document carries.",
        _bars([(name, count, f"{count:,}") for name, count in list(facts.licences.items())[:20]]),
    )
    yield _section(
        "Dropped",
        "Documents by stage and reason; the ledger has each of them.",
        _bars([(f"{stage}: {reason}", count, f"{count:,}") for (stage, reason), count in _sorted(facts.drops)]),
    )
    if facts.taken_out:
        rows_out = [(stage, name, count) for stage, counts in facts.taken_out.items() for name, count in counts.items()]
        yield _section("Taken out of documents", "", _table(("stage", "what", "number"), rows_out))
    if facts.clusters:
        yield _section(
            "Near-duplicate clusters",
            f"{sum(facts.clusters.values()):,} clusters by their number of documents; one of each was kept.",
            _bars([(f"{name} documents", count, f"{count:,}") for name, count in _cluster_sizes(facts.clusters)])
            + _table(("kept document", "documents in its cluster"), facts.largest_clusters),
        )
    yield _section("Samples", "", "".join(map(_samples, facts.samples.items())))


def _samples(item: tuple[str, list[Document]]) -> str:
    source, documents = item
    shown = ""
    for document in documents:
        text = document.text[:SAMPLE_CHARACTERS] + ("…" if len(document.text) > SAMPLE_CHARACTERS else "")
        meta = json.dumps(document.meta, ensure_ascii=False)
        shown += f"<p class=meta>{escape(document.id)} {escape(meta[:300])}</p><pre>{escape(text)}</pre>"
    return f"<details><summary>{escape(source or '(no source)')}</summary>{shown}</details>"


def _section(title: str, note: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(note)}</p>{body}</section>"


def _bars(rows: Sequence[Row]) -> str:
    most = max((value for _, value, _ in rows), default=0) or 1
    made = "".join(
        f"<tr><th>{escape(name)}</th><td><i style='width:{100 * value / most:.2f}%'></i></td>"
        f"<td>{escape(shown)}</td></tr>"
        for name, value, shown in rows
    )
    return f"<div class=wide><table class=bars>{made}</table></div>" if rows else "<p>None.</p>"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(f'{v:,}' if isinstance(v, int) else str(v))}</td>" for v in row) + "</tr>"
        for row in rows
    )
    return f"<div class=wide><table class=plain><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def _sorted(drops: dict[tuple[str, str], int]) -> list[tuple[tuple[str, str], int]]:
    return sorted(drops.items(), key=lambda item: -item[1])[:40]


def _cluster_sizes(clusters: Counter[int]) -> list[tuple[str, int]]:
    edges = [2, 3, 4, 5, 10, 20, 50, 100, 1000, 1 << 62]
    rows = []
    for low, high in pairwise(edges):
        name = str(low) if high == low + 1 else f"{low:,} to {high - 1:,}" if high < 1 << 62 else f"{low:,} and more"
        rows.append((name, sum(count for size, count in clusters.items() if low <= size < high)))
    return [row for row in rows if row[1]]


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
