"""JATS and NLM articles to text: title, abstract, sections, lists, tables, captions, formulas, notes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
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

# Some publishers print an identifier under every figure, some tell the reader where to click.
_NOISE = re.compile(r"(?:DOI|doi)\s*:?\s*\S+|Click here for (?:additional data )?file\.?")


def article_text(article: Any) -> str:
    """Return the text of an `article` element without namespaces; Markdown-like."""
    return "\n\n".join(block for block in _blocks(article) if block.strip())


def _blocks(article: Any) -> Iterator[str]:
    yield from _front(article)
    for part in ("body", "floats-group", "back"):
        for element in article.findall(part):
            yield from _children(element, 2, 0)
    for element in article:
        if element.tag in ("sub-article", "response"):
            yield from _blocks(element)


def _front(article: Any) -> Iterator[str]:
    for meta in article.xpath("front/article-meta | front-stub | front/front-stub")[:1]:
        title = meta.find(".//title-group/article-title")
        if title is not None and (text := flat(_without_notes(title))):
            subtitles = [flat(sub) for sub in meta.findall("title-group/subtitle")]
            level = 1 if article.tag == "article" else 2
            yield heading(": ".join([text, *filter(None, subtitles)]), level)
        for abstract in meta.xpath("abstract | trans-abstract"):
            if abstract.get("abstract-type") in ("graphical", "toc"):
                continue
            yield heading(_taken(abstract, "title") or "Abstract", 2)
            yield from _children(abstract, 3, 0)


def _children(element: Any, level: int, depth: int) -> Iterator[str]:
    """Yield the blocks in an element; text and inline elements between them make paragraphs."""
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
            yield from _block(child, tag, level, depth + 1)
        else:
            loose.append(inline_node(child, tag, 0))
        loose.append(child.tail or "")
    if paragraph := _joined(loose):
        yield paragraph


def _block(element: Any, tag: str, level: int, depth: int) -> Iterator[str]:
    if tag in DROPPED:
        return
    if depth > MAX_DEPTH:
        yield SPACE.sub(" ", "".join(element.itertext())).strip()
    else:
        yield from _BLOCK_MAKERS.get(tag, _children)(element, level, depth)


def _paragraph(element: Any, level: int, depth: int) -> Iterator[str]:
    # JATS puts figures, lists and formulas inside paragraphs: they split it.
    if any(child.tag in BLOCKS or child.tag == "alternatives" for child in element):
        yield from _children(element, level, depth)
    elif (text := flat(element)) and not _NOISE.fullmatch(text):
        yield text


def _title(element: Any, level: int, depth: int) -> Iterator[str]:
    if text := flat(element):
        yield heading(text, level)


def _section(element: Any, level: int, depth: int) -> Iterator[str]:
    if name := _taken(element, "label", "title") or _SECTION_NAMES.get(element.tag, ""):
        yield heading(name, level)
    yield from _children(element, level + 1, depth)


def _formula(element: Any, level: int, depth: int) -> Iterator[str]:
    label = element.find("label")
    number = f" {flat(label)}" if label is not None else ""
    if latex := formula_latex(element):
        yield f"$${latex}$${number}"
        return
    _taken(element, "label")
    if text := flat(element):
        yield text + number


def _figure(element: Any, level: int, depth: int) -> Iterator[str]:
    """Yield `Figure 1. Caption`; of a table the caption, then the table with its notes."""
    name, caption = _taken(element, "label"), element.find("caption")
    parts: list[str] = []
    if caption is not None:
        parts = _led(_taken(caption, "title"), list(_children(caption, 6, depth)), (".", "?", "!", ":"))
        _remove(caption)
    if name:
        name = name if name.endswith((".", ":")) else f"{name}."
        parts[:1] = [f"{name} {parts[0]}"] if parts else [name] if element.tag != "supplementary-material" else []
    yield from parts
    yield from _children(element, level, depth)


def _table(element: Any, level: int, depth: int) -> Iterator[str]:
    rows, header_rows = table_rows(element)
    if text := pipe_table(rows, header_rows):
        yield text


def _list(element: Any, level: int, depth: int) -> Iterator[str]:
    numbered = element.get("list-type", "bullet") in _NUMBERED
    lines = [flat(title) for title in element.findall("title")[:1]]
    for number, item in enumerate(element.findall("list-item"), 1):
        unlabelled = item.find("label") is None
        mark = (f"{number}." if numbered else "-") if unlabelled else _taken(item, "label")
        text = "\n\n".join(_children(item, 6, depth + 1))
        nested = item.find("list") is not None and item.find("p") is not None
        text = text.replace("\n\n", "\n") if nested and text.count("\n\n") == 1 else text
        if text:
            lines.append(indented(text, f"{mark} ", " " * (len(mark) + 1)))
    if lines:
        yield "\n".join(lines)


def _definitions(element: Any, level: int, depth: int) -> Iterator[str]:
    lines = []
    for child in element:
        if child.tag == "title":
            lines.append(flat(child))
        elif child.tag == "def-list":
            lines.extend(_definitions(child, level, depth + 1) if depth < MAX_DEPTH else [])
        elif child.tag == "def-item":
            meaning = " ".join(flat(part) for part in child.findall("def"))
            name = _taken(child, "term")
            lines.append(f"- {name}: {meaning}" if name else f"- {meaning}")
    if lines:
        yield "\n".join(lines)


def _quote(element: Any, level: int, depth: int) -> Iterator[str]:
    if text := "\n\n".join(_children(element, 6, depth)):
        yield "\n".join(f"> {line}" if line else ">" for line in text.split("\n"))


def _verse(element: Any, level: int, depth: int) -> Iterator[str]:
    if lines := [flat(line) for line in element.iter("title", "verse-line", "attrib")]:
        yield "\n".join(lines)


def _code(element: Any, level: int, depth: int) -> Iterator[str]:
    if text := "".join(element.itertext()).strip("\n"):
        yield f"```\n{text}\n```"


def _note(element: Any, level: int, depth: int) -> Iterator[str]:
    mark = _taken(element, "label")
    blocks = list(_children(element, 6, depth))
    if blocks and mark:
        blocks[0] = f"{mark} {blocks[0]}"
    yield from blocks


def _statement(element: Any, level: int, depth: int) -> Iterator[str]:
    name = _taken(element, "label", "title")
    yield from _led(name, list(_children(element, 6, depth)), (".", ":"))


def _speech(element: Any, level: int, depth: int) -> Iterator[str]:
    name = _taken(element, "speaker")
    blocks = list(_children(element, 6, depth))
    if name and blocks:
        blocks[0] = f"{name.rstrip(':')}: {blocks[0]}"
    yield from blocks


def _first_form(element: Any, level: int, depth: int) -> Iterator[str]:
    for child in element:
        if isinstance(child.tag, str) and (blocks := list(_block(child, child.tag, level, depth))):
            yield from blocks
            return


_NUMBERED = frozenset(("order", "alpha-lower", "alpha-upper", "roman-lower", "roman-upper"))
_SECTION_NAMES = {"ack": "Acknowledgements", "glossary": "Glossary"}
_SECTIONS = str.split("sec ack app app-group notes glossary boxed-text fn-group")
_FIGURES = str.split("fig table-wrap supplementary-material table-wrap-group fig-group chem-struct-wrap media")
_BLOCK_MAKERS: dict[str, Callable[[Any, int, int], Iterator[str]]] = {
    **dict.fromkeys(_SECTIONS, _section),
    **dict.fromkeys(_FIGURES, _figure),
    **dict.fromkeys(("table", "array"), _table),
    **dict.fromkeys(("code", "preformat"), _code),
    **dict.fromkeys(("alternatives", "block-alternatives"), _first_form),
    "p": _paragraph,
    "title": _title,
    "disp-formula": _formula,
    "list": _list,
    "def-list": _definitions,
    "disp-quote": _quote,
    "verse-group": _verse,
    "fn": _note,
    "statement": _statement,
    "speech": _speech,
}


def _taken(element: Any, *tags: str) -> str:
    """Remove the first child of each tag; return their text, separated by spaces."""
    found = [child for child in map(element.find, tags) if child is not None]
    text = " ".join(map(flat, found))
    for child in found:
        _remove(child)
    return text


def _led(lead: str, blocks: list[str], ends: tuple[str, ...]) -> list[str]:
    """Return the blocks with a lead before the first one, separated by a full stop."""
    if not lead:
        return blocks
    return [f"{lead}{'' if lead.endswith(ends) else '.'} {blocks[0]}", *blocks[1:]] if blocks else [lead]


def _joined(loose: list[str]) -> str:
    text = SPACE.sub(" ", "".join(loose)).strip()
    return "" if _NOISE.fullmatch(text) else text


def _remove(element: Any) -> None:
    """Remove an element from its parent but keep the text that follows it."""
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
