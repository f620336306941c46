"""Convert the text within a paragraph of JATS (scripts, citations, formulas, links) and the cells of tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from piledriver.corpus.formats.markdown import lowered, raised
from piledriver.corpus.formats.mathml import to_latex
from piledriver.corpus.formats.xml.parse import entity_text
from piledriver.corpus.text.data_table import data_table, word_set

MAX_DEPTH = 80
MAX_SPAN = 50

SPACE = re.compile(r"\s+")
_ONLY_NUMBERS = re.compile(r"[\d\s,;–—-]+")
_TAGS = data_table(__package__, "tags.yaml")
DROPPED, BLOCKS = word_set(_TAGS["dropped"]), word_set(_TAGS["blocks"])


def inline(element: Any, depth: int = 0) -> str:
    """Return the text of a mixed element: scripts, formulas, citations and links as a reader sees them."""
    parts = [element.text or ""]
    for child in element:
        tag = child.tag
        if isinstance(tag, str):
            parts.append(inline_node(child, tag, depth))
        elif child.text is not None and getattr(child, "name", None) and not hasattr(child, "target"):
            parts.append(entity_text(child.name))
        if child.tail:
            parts.append(child.tail)
    return "".join(parts)


def flat(element: Any) -> str:
    """Return the text of a mixed element with every run of white space as one space."""
    return " ".join((inline(element) if len(element) else element.text or "").split())


def inline_node(child: Any, tag: str, depth: int) -> str:
    """Return the text of one element within a line."""
    if depth > MAX_DEPTH:
        return "".join(child.itertext())
    special = _INLINE.get(tag)
    if special is not None:
        return special(child, depth + 1)
    if tag in DROPPED:
        return ""
    text = inline(child, depth + 1)
    return f" {text} " if tag in BLOCKS else text


def _superscript(element: Any, depth: int) -> str:
    text = inline(element, depth)
    cites = element.find("xref[@ref-type='bibr']") is not None
    if cites and _ONLY_NUMBERS.fullmatch(text):
        return f"[{text.strip()}]"
    return text if text.startswith(("[", "(")) and cites else raised(text)


def _citation(element: Any, depth: int) -> str:
    text = inline(element, depth)
    if element.get("ref-type") in ("table-fn", "fn") and len(text) <= 2 and text.isalnum():
        # The mark of a note is raised, to keep it apart from its word.
        return raised(text)
    if element.get("ref-type") == "bibr" and text.startswith(("⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹")):
        inner = "".join(element.itertext()).strip()
        return f"[{inner}]" if _ONLY_NUMBERS.fullmatch(inner) else text
    return text


def _formula(element: Any, depth: int) -> str:
    return f"${latex}$" if (latex := formula_latex(element)) else inline(element, depth)


def formula_latex(element: Any) -> str:
    """Return the LaTeX of a formula element, from its TeX or its MathML; an empty string where it has neither."""
    for tex in element.iter("tex-math"):
        body = "".join(tex.itertext())
        # Publishers put a whole document around each formula.
        _, _, inside = body.partition("\\begin{document}")
        body = inside.partition("\\end{document}")[0] if inside else body
        body = " ".join(body.split()).strip()
        for mark in ("$$", "$"):
            if len(body) >= 2 * len(mark) and body.startswith(mark) and body.endswith(mark):
                body = body[len(mark) : -len(mark)].strip()
        body = body.removeprefix("\\[").removesuffix("\\]").removeprefix("\\(").removesuffix("\\)").strip()
        if body:
            return body
    math = element if element.tag == "math" else next(element.iter("math"), None)
    return to_latex(math) if math is not None else ""


def _link(element: Any, depth: int) -> str:
    text = inline(element, depth)
    if text.strip():
        return text
    return next((value for name, value in element.attrib.items() if name.endswith("href")), "")


def _alternatives(element: Any, depth: int) -> str:
    if latex := formula_latex(element):
        return f"${latex}$"
    return next((text for child in element if (text := inline_node(child, str(child.tag), depth)).strip()), "")


def _code(element: Any, depth: int) -> str:
    text = "".join(element.itertext()).strip()
    return f"`{text}`" if "\n" not in text else text


_INLINE: dict[str, Callable[[Any, int], str]] = {
    "sup": _superscript,
    "sub": lambda element, depth: lowered(inline(element, depth)),
    "xref": _citation,
    "inline-formula": _formula,
    "disp-formula": lambda element, depth: f" {_formula(element, depth)} ",
    "math": _formula,
    "tex-math": _formula,
    "alternatives": _alternatives,
    "ext-link": _link,
    "uri": _link,
    "break": lambda element, depth: " ",
    "code": _code,
    "fn": lambda element, depth: f" ({' '.join(inline(element, depth).split())})",
}


def table_rows(table: Any) -> tuple[list[list[str]], int]:
    """Return the cells of an XHTML or CALS table as a grid, and the number of header rows; spans leave empty cells."""
    rows: list[list[str]] = []
    taken: dict[int, int] = {}
    header_rows = 0
    for row in table.iter("tr", "row"):
        cells: list[str] = []
        for cell in row:
            if cell.tag not in ("td", "th", "entry"):
                continue
            while taken.get(len(cells), 0) > 0:
                taken[len(cells)] -= 1
                cells.append("")
            columns, lasting = _span(cell, "colspan"), _span(cell, "rowspan") + _span(cell, "morerows", 0)
            for column in range(columns):
                if lasting > 1:
                    taken[len(cells)] = lasting - 1
                cells.append(flat(cell) if column == 0 else "")
        while taken.get(len(cells), 0) > 0:
            taken[len(cells)] -= 1
            cells.append("")
        rows.append(cells)
        parent = row.getparent()
        header_rows += parent is not None and parent.tag == "thead"
    return rows, header_rows


def _span(cell: Any, name: str, default: int = 1) -> int:
    value = cell.get(name, "")
    return min(int(value), MAX_SPAN) if value.isdecimal() and len(value) < 6 else default
