"""JATS and NLM articles to text: title, abstract, sections, lists, tables, captions, formulas, notes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from piledriver.corpus.formats.jats.inline import (
    BLOCKS,
    DROPPED,
    MAX_DEPTH,
    SPACE,
    flat,
    formula_latex,
    inline_node,
    table_rows,
)
from piledriver.corpus.formats.markdown import heading, indented, pipe_table

# Some publishers set an identifier under every figure, some tell the reader where to click.
_NOISE = re.compile(r"(?:DOI|doi)\s*:?\s*\S+|Click here for (?:additional data )?file\.?")


def article_text(article: Any) -> str:
    """The readable text of an `article` element without namespaces; Markdown-like."""
    return "\n\n".join(block for block in _Article(article).blocks() if block.strip())


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
            if tag in BLOCKS or (tag == "alternatives" and any(part.tag in BLOCKS for part in child)):
                if paragraph := _joined(loose):
                    yield paragraph
                loose = []
                yield from self._block(child, tag, level, depth + 1)
            else:
                loose.append(inline_node(child, tag, 0))
            loose.append(child.tail or "")
        if paragraph := _joined(loose):
            yield paragraph

    def _block(self, element: Any, tag: str, level: int, depth: int) -> Iterator[str]:
        if tag in DROPPED:
            return
        if depth > MAX_DEPTH:
            yield SPACE.sub(" ", "".join(element.itertext())).strip()
            return
        maker = _BLOCK_MAKERS.get(tag)
        if maker is not None:
            yield from maker(self, element, level, depth)
        else:
            yield from self._children(element, level, depth)

    def paragraph(self, element: Any, level: int, depth: int) -> Iterator[str]:
        # Figures, lists and formulas stand inside paragraphs in JATS: they split it where they stand.
        if any(child.tag in BLOCKS or child.tag == "alternatives" for child in element):
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


def _joined(loose: list[str]) -> str:
    text = SPACE.sub(" ", "".join(loose)).strip()
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
