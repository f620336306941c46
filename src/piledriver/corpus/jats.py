"""JATS and NLM articles to text: title, abstract, sections, lists, tables, captions, formulas, notes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from piledriver.corpus.markdown import heading, indented, lowered, pipe_table, raised
from piledriver.corpus.mathml import to_latex
from piledriver.corpus.xml import entity_text

MAX_DEPTH = 80
MAX_SPAN = 50

_SPACE = re.compile(r"\s+")
# Some publishers set an identifier under every figure, some tell the reader where to click.
_NOISE = re.compile(r"(?:DOI|doi)\s*:?\s*\S+|Click here for (?:additional data )?file\.?")
_ONLY_NUMBERS = re.compile(r"[\d\s,;–—-]+")
_DROPPED = frozenset(
    str.split(
        "ref-list object-id graphic inline-graphic alt-text long-desc contrib-group aff author-notes bio "
        "pub-date "
        "permissions index-term x hr milestone-start milestone-end sig-block processing-meta related-object kwd-group "
        "history article-id self-uri counts custom-meta-group funding-group conference colgroup col"
    )
)
_BLOCKS = frozenset(
    str.split(
        "p sec disp-formula disp-formula-group list def-list table-wrap table-wrap-group fig fig-group boxed-text "
        "disp-quote verse-group code preformat statement supplementary-material speech fn-group fn glossary ack app "
        "app-group notes title array table-wrap-foot caption chem-struct-wrap question answer explanation abstract "
        "trans-abstract body back floats-group floats-wrap table attrib media answer-set question-wrap "
        "block-alternatives"
    )
)


def strip_namespaces(root: Any) -> None:
    """`{http://...}math` becomes `math` everywhere: the local names of JATS, MathML and XLink never clash."""
    for element in root.iter("{*}*"):
        tag = element.tag
        if tag[0] == "{":
            element.tag = tag.rpartition("}")[2]


def article_text(article: Any) -> str:
    """The readable text of an `article` element without namespaces; Markdown-like."""
    return "\n\n".join(block for block in _Article(article).blocks() if block.strip())


def inline(element: Any, depth: int = 0) -> str:
    """The text of a mixed element on one line: scripts, formulas, citations and links as a reader sees them."""
    parts = [element.text or ""]
    for child in element:
        tag = child.tag
        if isinstance(tag, str):
            parts.append(_inline_node(child, tag, depth))
        elif child.text is not None and getattr(child, "name", None) and not hasattr(child, "target"):
            parts.append(entity_text(child.name))
        if child.tail:
            parts.append(child.tail)
    return "".join(parts)


def flat(element: Any) -> str:
    """`inline` with every run of white space as one space."""
    return _SPACE.sub(" ", inline(element)).strip()


def _inline_node(child: Any, tag: str, depth: int) -> str:
    if depth > MAX_DEPTH:
        return "".join(child.itertext())
    special = _INLINE.get(tag)
    if special is not None:
        return special(child, depth + 1)
    if tag in _DROPPED:
        return ""
    text = inline(child, depth + 1)
    return f" {text} " if tag in _BLOCKS else text


def _superscript(element: Any, depth: int) -> str:
    text = inline(element, depth)
    cites = element.find("xref[@ref-type='bibr']") is not None
    if cites and _ONLY_NUMBERS.fullmatch(text):
        return f"[{text.strip()}]"
    return text if text.startswith(("[", "(")) and cites else raised(text)


def _citation(element: Any, depth: int) -> str:
    text = inline(element, depth)
    if element.get("ref-type") in ("table-fn", "fn") and len(text) <= 2 and text.isalnum():
        # The mark of a note is raised on the page; on the line it would run into its word.
        return raised(text)
    if element.get("ref-type") == "bibr" and text.startswith(("⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹")):
        inner = "".join(element.itertext()).strip()
        return f"[{inner}]" if _ONLY_NUMBERS.fullmatch(inner) else text
    return text


def _formula(element: Any, depth: int) -> str:
    return f"${latex}$" if (latex := formula_latex(element)) else _fallback(element, depth)


def _fallback(element: Any, depth: int) -> str:
    return inline(element, depth)


def formula_latex(element: Any) -> str:
    """The LaTeX of a formula element: its own TeX where it has some, else its MathML; empty where it has neither."""
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
    return next((text for child in element if (text := _inline_node(child, str(child.tag), depth)).strip()), "")


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


class _Article:
    """One conversion: where the floats are, which notes were found on the way."""

    def __init__(self, article: Any) -> None:
        self._article = article

    def blocks(self) -> Iterator[str]:
        yield from self._front(self._article)
        for part in ("body", "floats-group", "back"):
            for element in self._article.findall(part):
                yield from self._children(element, 2, 0)
        for element in self._article:
            if element.tag in ("sub-article", "response"):
                yield from _Article(element).blocks()

    def _front(self, article: Any) -> Iterator[str]:
        for meta in article.xpath("front/article-meta | front-stub | front/front-stub")[:1]:
            title = meta.find(".//title-group/article-title")
            if title is not None and (text := flat(_without_notes(title))):
                subtitles = [flat(sub) for sub in meta.findall("title-group/subtitle")]
                level = 1 if article.tag == "article" else 2
                yield heading(": ".join([text, *filter(None, subtitles)]), level)
            for abstract in meta.xpath("abstract | trans-abstract"):
                if abstract.get("abstract-type") in ("graphical", "toc"):
                    continue
                title = abstract.find("title")
                yield heading(flat(title) if title is not None else "Abstract", 2)
                if title is not None:
                    _remove(title)
                yield from self._children(abstract, 3, 0)

    def _children(self, element: Any, level: int, depth: int) -> Iterator[str]:
        """The blocks in an element; text and inline elements that stand between them make paragraphs."""
        loose: list[str] = [element.text or ""]
        for child in element:
            tag = child.tag
            if not isinstance(tag, str):
                loose.append(child.tail or "")
                continue
            if tag in _BLOCKS or (tag == "alternatives" and any(part.tag in _BLOCKS for part in child)):
                if paragraph := _joined(loose):
                    yield paragraph
                loose = []
                yield from self._block(child, tag, level, depth + 1)
            else:
                loose.append(_inline_node(child, tag, 0))
            loose.append(child.tail or "")
        if paragraph := _joined(loose):
            yield paragraph

    def _block(self, element: Any, tag: str, level: int, depth: int) -> Iterator[str]:
        if tag in _DROPPED:
            return
        if depth > MAX_DEPTH:
            yield _SPACE.sub(" ", "".join(element.itertext())).strip()
            return
        maker = _BLOCK_MAKERS.get(tag)
        if maker is not None:
            yield from maker(self, element, level, depth)
        else:
            yield from self._children(element, level, depth)

    def paragraph(self, element: Any, level: int, depth: int) -> Iterator[str]:
        # Figures, lists and formulas stand inside paragraphs in JATS: they split it where they stand.
        if any(child.tag in _BLOCKS or child.tag == "alternatives" for child in element):
            yield from self._children(element, level, depth)
        elif (text := flat(element)) and not _NOISE.fullmatch(text):
            yield text

    def title(self, element: Any, level: int, depth: int) -> Iterator[str]:
        if text := flat(element):
            yield heading(text, level)

    def section(self, element: Any, level: int, depth: int) -> Iterator[str]:
        label, title = element.find("label"), element.find("title")
        name = " ".join(flat(part) for part in (label, title) if part is not None)
        if name:
            yield heading(name, level)
        elif default := _SECTION_NAMES.get(element.tag):
            yield heading(default, level)
        for part in (label, title):
            if part is not None:
                _remove(part)
        yield from self._children(element, level + 1, depth)

    def formula(self, element: Any, level: int, depth: int) -> Iterator[str]:
        label = element.find("label")
        number = f" {flat(label)}" if label is not None else ""
        if latex := formula_latex(element):
            yield f"$${latex}$${number}"
            return
        if label is not None:
            _remove(label)
        if text := flat(element):
            yield text + number

    def figure(self, element: Any, level: int, depth: int) -> Iterator[str]:
        """`Figure 1. Caption`; a table below its caption, with its notes."""
        label, caption = element.find("label"), element.find("caption")
        name = flat(label) if label is not None else ""
        parts = list(self._caption(caption, depth)) if caption is not None else []
        if name:
            name = name if name.endswith((".", ":")) else f"{name}."
            parts[:1] = [f"{name} {parts[0]}"] if parts else [name] if element.tag != "supplementary-material" else []
        yield from parts
        for child in (label, caption):
            if child is not None:
                _remove(child)
        yield from self._children(element, level, depth)

    def _caption(self, caption: Any, depth: int) -> Iterator[str]:
        title = caption.find("title")
        lead = flat(title) if title is not None else ""
        if title is not None:
            _remove(title)
        blocks = list(self._children(caption, 6, depth))
        if lead and blocks:
            blocks[0] = f"{lead}{'' if lead.endswith(('.', '?', '!', ':')) else '.'} {blocks[0]}"
        elif lead:
            blocks = [lead]
        yield from blocks

    def table(self, element: Any, level: int, depth: int) -> Iterator[str]:
        rows, header_rows = table_rows(element)
        if text := pipe_table(rows, header_rows):
            yield text

    def item_list(self, element: Any, level: int, depth: int) -> Iterator[str]:
        kind = element.get("list-type", "bullet")
        lines = []
        if (title := element.find("title")) is not None:
            lines.append(flat(title))
        for number, item in enumerate(element.findall("list-item"), 1):
            label = item.find("label")
            mark = flat(label) if label is not None else f"{number}." if kind in _NUMBERED else "-"
            if label is not None:
                _remove(label)
            text = "\n\n".join(self._children(item, 6, depth + 1))
            nested = item.find("list") is not None and item.find("p") is not None
            text = text.replace("\n\n", "\n") if nested and text.count("\n\n") == 1 else text
            if text:
                lines.append(indented(text, f"{mark} ", " " * (len(mark) + 1)))
        if lines:
            yield "\n".join(lines)

    def definitions(self, element: Any, level: int, depth: int) -> Iterator[str]:
        lines = []
        for child in element:
            if child.tag == "title":
                lines.append(flat(child))
            elif child.tag == "def-list":
                lines.extend(self.definitions(child, level, depth + 1) if depth < MAX_DEPTH else [])
            elif child.tag == "def-item":
                term, meaning = child.find("term"), [flat(part) for part in child.findall("def")]
                name = flat(term) if term is not None else ""
                lines.append(f"- {name}: {' '.join(meaning)}" if name else f"- {' '.join(meaning)}")
        if lines:
            yield "\n".join(lines)

    def quote(self, element: Any, level: int, depth: int) -> Iterator[str]:
        if text := "\n\n".join(self._children(element, 6, depth)):
            yield "\n".join(f"> {line}" if line else ">" for line in text.split("\n"))

    def verse(self, element: Any, level: int, depth: int) -> Iterator[str]:
        if lines := [flat(line) for line in element.iter("title", "verse-line", "attrib")]:
            yield "\n".join(lines)

    def code(self, element: Any, level: int, depth: int) -> Iterator[str]:
        if text := "".join(element.itertext()).strip("\n"):
            yield f"```\n{text}\n```"

    def note(self, element: Any, level: int, depth: int) -> Iterator[str]:
        label = element.find("label")
        mark = flat(label) if label is not None else ""
        if label is not None:
            _remove(label)
        blocks = list(self._children(element, 6, depth))
        if blocks and mark:
            blocks[0] = f"{mark} {blocks[0]}"
        yield from blocks

    def statement(self, element: Any, level: int, depth: int) -> Iterator[str]:
        label, title = element.find("label"), element.find("title")
        name = " ".join(flat(part) for part in (label, title) if part is not None)
        for part in (label, title):
            if part is not None:
                _remove(part)
        blocks = list(self._children(element, 6, depth))
        if name:
            blocks[:1] = [f"{name}{'' if name.endswith(('.', ':')) else '.'} {blocks[0]}"] if blocks else [name]
        yield from blocks

    def speech(self, element: Any, level: int, depth: int) -> Iterator[str]:
        speaker = element.find("speaker")
        name = flat(speaker) if speaker is not None else ""
        if speaker is not None:
            _remove(speaker)
        blocks = list(self._children(element, 6, depth))
        if name and blocks:
            blocks[0] = f"{name.rstrip(':')}: {blocks[0]}"
        yield from blocks

    def one_of(self, element: Any, level: int, depth: int) -> Iterator[str]:
        for child in element:
            if isinstance(child.tag, str) and (blocks := list(self._block(child, child.tag, level, depth))):
                yield from blocks
                return


_NUMBERED = frozenset(("order", "alpha-lower", "alpha-upper", "roman-lower", "roman-upper"))
_SECTION_NAMES = {"ack": "Acknowledgements", "glossary": "Glossary"}
_BLOCK_MAKERS = {
    "p": _Article.paragraph,
    "title": _Article.title,
    "sec": _Article.section,
    "ack": _Article.section,
    "app": _Article.section,
    "app-group": _Article.section,
    "notes": _Article.section,
    "glossary": _Article.section,
    "boxed-text": _Article.section,
    "fn-group": _Article.section,
    "disp-formula": _Article.formula,
    "fig": _Article.figure,
    "table-wrap": _Article.figure,
    "supplementary-material": _Article.figure,
    "table-wrap-group": _Article.figure,
    "fig-group": _Article.figure,
    "chem-struct-wrap": _Article.figure,
    "table": _Article.table,
    "array": _Article.table,
    "list": _Article.item_list,
    "def-list": _Article.definitions,
    "disp-quote": _Article.quote,
    "verse-group": _Article.verse,
    "code": _Article.code,
    "preformat": _Article.code,
    "fn": _Article.note,
    "statement": _Article.statement,
    "speech": _Article.speech,
    "media": _Article.figure,
    "alternatives": _Article.one_of,
    "block-alternatives": _Article.one_of,
}


def table_rows(table: Any) -> tuple[list[list[str]], int]:
    """The cells of an XHTML or CALS table as a grid, and how many rows its head has; spans leave empty cells."""
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


def _joined(loose: list[str]) -> str:
    text = _SPACE.sub(" ", "".join(loose)).strip()
    return "" if _NOISE.fullmatch(text) else text


def _remove(element: Any) -> None:
    """Take an element out of its parent but leave the text behind it."""
    parent, tail = element.getparent(), element.tail
    if tail and tail.strip():
        previous = element.getprevious()
        if previous is not None:
            previous.tail = (previous.tail or "") + tail
        else:
            parent.text = (parent.text or "") + tail
    parent.remove(element)


def _without_notes(title: Any) -> Any:
    for note in list(title.iter("fn", "xref")):
        if note.tag == "fn" or note.get("ref-type") in ("fn", "author-notes"):
            _remove(note)
    return title
