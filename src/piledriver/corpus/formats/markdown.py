"""The elements of Markdown that converters write: headings, pipe tables, super- and subscripts, list items."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

MAX_COLUMNS = 200
_RAISED = str.maketrans("0123456789+-−–=()n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁻⁼⁽⁾ⁿ")
_LOWERED = str.maketrans("0123456789+-−–=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₋₌₍₎")
_RAISABLE = frozenset("0123456789+-−–=()n ")
_LOWERABLE = frozenset("0123456789+-−–=() ")
MAX_HEADING = 6


def heading(title: str, level: int) -> str:
    """Return `## Title`, on one line.

    >>> heading("Results and\\n discussion", 2)
    '## Results and discussion'
    """
    return f"{'#' * min(max(level, 1), MAX_HEADING)} {' '.join(title.split())}"


def raised(text: str) -> str:
    """Return a superscript: in Unicode where all its characters exist, else as in TeX.

    >>> raised("-3"), raised("th"), raised("T"), raised("")
    ('⁻³', '^{th}', '^T', '')
    >>> "10" + raised("2 ") + "cells"
    '10² cells'
    """
    return _script(text, "^", _RAISED, _RAISABLE)


def lowered(text: str) -> str:
    """Return a subscript: in Unicode where all its characters exist, else as in TeX.

    >>> "H" + lowered("2") + "O", "K" + lowered("max")
    ('H₂O', 'K_{max}')
    """
    return _script(text, "_", _LOWERED, _LOWERABLE)


def _script(text: str, mark: str, table: dict[int, int], possible: frozenset[str]) -> str:
    stripped = text.strip()
    if not stripped:
        return text
    if possible.issuperset(stripped):
        script = stripped.translate(table)
    elif len(stripped) == 1:
        # An asterisk, a dagger or a degree sign is raised already.
        script = stripped if mark == "^" and unicodedata.category(stripped)[0] in "PS" else f"{mark}{stripped}"
    else:
        script = f"{mark}{{{stripped}}}"
    # Typesetters leave the space after a word inside the script; one before it has no meaning.
    return f"{script} " if text[-1].isspace() else script


def pipe_table(rows: Iterable[Sequence[str]], header_rows: int = 1) -> str:
    """Return a table with `|` between its cells and a rule under the header rows.

    >>> print(pipe_table([["a", "b"], ["1", "2 | 3"]]))
    | a | b |
    |---|---|
    | 1 | 2 / 3 |
    """
    cleaned = [[" ".join(cell.split()).replace("|", "/") for cell in row[:MAX_COLUMNS]] for row in rows]
    cleaned = [row for row in cleaned if any(row)]
    if not cleaned:
        return ""
    width = max(map(len, cleaned))
    used = [any(index < len(row) and row[index] for row in cleaned) for index in range(width)]
    lines = ["| " + " | ".join(cell for cell, keep in zip(row, used, strict=False) if keep) + " |" for row in cleaned]
    lines.insert(min(max(header_rows, 1), len(lines)), "|" + "---|" * sum(used))
    return "\n".join(lines)


def indented(text: str, first: str, rest: str) -> str:
    """Return a list item: the mark before its first line, the indent before the others.

    >>> indented("one\\n\\ntwo", "- ", "  ")
    '- one\\n\\n  two'
    """
    lines = text.split("\n")
    return "\n".join(first + line if index == 0 else rest + line if line else line for index, line in enumerate(lines))
