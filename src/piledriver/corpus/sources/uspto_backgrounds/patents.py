"""US patents in their three formats to one shape: the front page, and the description by headings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lxml import etree

from piledriver.corpus.formats.jats.inline import flat, table_rows
from piledriver.corpus.formats.markdown import pipe_table
from piledriver.corpus.formats.xml.entities import with_character_entities
from piledriver.corpus.formats.xml.parse import XmlError, parse_xml
from piledriver.corpus.sources.uspto_backgrounds.aps import characters, fields

_RENAMED = {"sb": "sub", "sp": "sup", "sup2": "sup", "sub2": "sub"}
# A heading of the same level that still belongs to the background, whose parts often have headings of its level.
_OF_BACKGROUND = re.compile(
    r"field|prior\s+art|related\s+art|state\s+of\s+the\s+art|description\s+of\s+(?:the\s+)?(?:related|prior|background)|background|"
    r"discussion\s+of|^\s*\(?[0-9a-z]{1,2}[.)]|statement\s+of|technical\s+problem|problem",
    re.IGNORECASE,
)
_NOT_OF_BACKGROUND = re.compile(
    r"summary|brief\s+description|detailed|disclosure|object|drawing|embodiment|claim|invention\s*$", re.IGNORECASE
)
_INVENTION_OF = re.compile(r"(?:field|background|state|technical|prior|related)[\w\s]*", re.IGNORECASE)
_SECTION_NAME = re.compile(r"\b(?:BACKGROUND|SUMMARY|PRIOR ART|FIELD OF|DESCRIPTION|OBJECTS? OF|OF THE INVENTION)\b")
_SECTIONS_OF_APS = frozenset(
    str.split("PATN INVT ASSG PRIR REIS RLAP CLAS UREF FREF OREF LREP PCTA ABST GOVT PARN BSUM DRWD DETD CLMS DCLM")
)


@dataclass(slots=True)
class Paragraph:
    """A paragraph or a heading of the description."""

    text: str
    level: int = 0
    """0 for a paragraph, else the level of the heading."""


@dataclass(slots=True)
class Patent:
    """One patent: number, front page, summary or description."""

    number: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    summary: list[Paragraph] | None = None
    """The brief summary, where the format has one that is taken whole (XML 2.5)."""
    description: Iterable[Paragraph] = ()
    """Read once, and only to the end of the background: most of a patent follows it."""


def background(lines: Iterable[Paragraph]) -> list[str]:
    """Return the paragraphs under the first heading with BACKGROUND, with the headings of its parts.

    It ends at the next heading of its level, except those of its parts: "1. Field of the Invention", "Description of
    Related Art".
    """
    rest = iter(lines)
    level = next((line.level for line in rest if line.level and "BACKGROUND" in line.text.upper()), None)
    if level is None:
        return []
    out: list[str] = []
    held: list[str] = []
    for line in rest:
        if line.level == 0:
            out += [*held, line.text]
            held = []
        elif line.level > level or _continues(line.text):
            held.append(line.text)
        else:
            break
    return out


def _continues(title: str) -> bool:
    if not _OF_BACKGROUND.search(title):
        return False
    return not _NOT_OF_BACKGROUND.search(_INVENTION_OF.sub("", title))


def from_aps(document: str) -> Patent:
    """Return a patent of 1976 to 2001."""
    lines: list[Paragraph] = []
    patent = Patent(meta={"inventor": [], "assignee": [], "classification": [], "citations": []}, description=lines)
    section = ""
    names = {"INVT": "inventor", "ASSG": "assignee"}
    abstract: list[str] = []
    for code, text in fields(document):
        if code in _SECTIONS_OF_APS and not text:
            section = code
        elif section == "PATN":
            if code == "WKU":
                patent.number = _aps_number(text)
            elif code == "TTL":
                patent.meta["title"] = characters(text)
            elif code == "ISD":
                patent.meta["date"] = _iso_date(text)
        elif section in names and code == "NAM":
            patent.meta[names[section]].append(text)
        elif section == "CLAS" and code in ("OCL", "ICL"):
            patent.meta["classification"].append(" ".join(text.split()))
        elif section == "UREF" and code == "PNO":
            patent.meta["citations"].append(text)
        elif section == "ABST" and code.startswith("PA"):
            abstract.append(characters(text))
        elif section == "BSUM" and text:
            if code == "PAC":
                lines.append(Paragraph(characters(text), 1))
            elif code.startswith("PA"):
                lines.append(Paragraph(characters(text), 1 if _is_heading(text) else 0))
            elif code == "TBL":
                lines.append(Paragraph(characters(text)))
    patent.meta["abstract"] = " ".join(abstract)
    return patent


def _is_heading(text: str) -> bool:
    """Return whether a paragraph is a heading not marked as one: capitals that name a section."""
    return len(text) < 90 and text.isupper() and _SECTION_NAME.search(text) is not None and text[-1:] != "."


def _aps_number(text: str) -> str:
    # Seven characters and a check digit; letters for designs, plants and reissues.
    digits = text.strip()
    digits = digits[:-1] if len(digits) == 9 else digits
    return digits.lstrip("0")


def _iso_date(text: str) -> str | None:
    """Return 20020101 as 2002-01-01, `None` for anything else."""
    text = text.strip()
    return f"{text[:4]}-{text[4:6]}-{text[6:8]}" if len(text) == 8 and text.isdecimal() else None


def from_xml(content: bytes) -> Patent | None:
    """Return a patent of 2001 on (XML 2.5, 4.x, applications 1.x), or `None` where the file holds something else."""
    root = _parsed(content)
    name = root.tag.lower()
    reader = _grant_2_5 if name == "patdoc" else _application_1 if name == "patent-application-publication" else None
    if name.startswith("us-patent"):
        # Its names need no change; only formulas may have a namespace.
        for element in root.iter("{*}*") if b"MathML" in content else ():
            element.tag = element.tag.rpartition("}")[2]
        return _version_4(root)
    if reader is None:
        return None
    for element in root.iter("*"):
        tag = element.tag.rpartition("}")[2].lower()
        element.tag = _RENAMED.get(tag, tag)
    return reader(root)


def _parsed(content: bytes) -> Any:
    content = with_character_entities(content)
    try:
        return parse_xml(content)
    except XmlError:
        # SGML of 2001 does not close empty elements. The parser repairs that, and still resolves and loads nothing.
        root = etree.fromstring(
            content,
            etree.XMLParser(
                recover=True, resolve_entities=False, load_dtd=False, no_network=True, remove_comments=True
            ),
        )
        if root is None or root.tag != "PATDOC":
            raise
        return root


def _grant_2_5(root: Any) -> Patent:
    front = root.find("sdobi")
    meta: dict[str, Any] = {"kind": _text(root, "sdobi/b100/b130"), "title": _text(root, "sdobi/b500/b540")}
    meta["date"] = _iso_date(_text(root, "sdobi/b100/b140"))
    if front is not None:
        meta["inventor"] = [_party(name) for name in front.iterfind("b700/b720/b721")]
        meta["assignee"] = [_party(name) for name in front.iterfind("b700/b730/b731")]
        meta["classification"] = [flat(e) for e in front.xpath("b500/b510/b511 | b500/b520/b521")]
        meta["citations"] = [flat(e) for e in front.iterfind("b500/b560/b561/pcit/doc/dnum")]
    abstract = root.find("sdoab")
    meta["abstract"] = " ".join(line.text for line in _lines(abstract)) if abstract is not None else ""
    summary = root.find(".//brfsum")
    return Patent(
        number=_text(root, "sdobi/b100/b110").lstrip("0"),
        meta=meta,
        summary=list(_lines(summary)) if summary is not None else [],
    )


def _party(element: Any) -> str:
    names = [flat(part) for part in element.xpath(".//fnm | .//snm | .//onm")]
    return " ".join(filter(None, names))


def _application_1(root: Any) -> Patent:
    front = root.find("subdoc-bibliographic-information")
    meta: dict[str, Any] = {"kind": _text(root, ".//kind-code"), "title": _text(root, ".//title-of-invention")}
    meta["date"] = _iso_date(_text(root, ".//document-id/document-date"))
    if front is not None:
        meta["inventor"] = [
            " ".join(flat(part) for part in name.xpath("./given-name | ./middle-name | ./family-name"))
            for name in front.xpath(".//inventors//name")
        ]
        meta["classification"] = [flat(e) for e in front.xpath(".//classification-ipc-primary/ipc")]
    description = root.find("subdoc-description")
    lines = list(_lines(description)) if description is not None else []
    named = root.find(".//background-of-invention")
    if named is not None and not any(line.level and "BACKGROUND" in line.text.upper() for line in lines):
        lines = [Paragraph("BACKGROUND", 1), *(Paragraph(line.text) for line in _lines(named))]
    meta["abstract"] = _text(root, "subdoc-abstract")
    return Patent(number=_text(root, ".//document-id/doc-number"), meta=meta, description=lines)


def _version_4(root: Any) -> Patent:
    identifier = next(iter(root.xpath("*/publication-reference/document-id")), None)
    meta: dict[str, Any] = {"title": _text(root, "*/invention-title")}
    number = ""
    if identifier is not None:
        number = _text(identifier, "doc-number").lstrip("0")
        meta["kind"], meta["date"] = _text(identifier, "kind"), _iso_date(_text(identifier, "date"))
    people = root.xpath(
        ".//inventors/inventor/addressbook | .//applicants/applicant[contains(@app-type, 'inventor')]/addressbook"
    )
    meta["inventor"] = [f"{_text(person, 'first-name')} {_text(person, 'last-name')}".strip() for person in people]
    meta["assignee"] = [
        name
        for a in root.iterfind(".//assignees/assignee")
        if (name := _text(a, "addressbook/orgname") or _text(a, "orgname"))
    ]
    meta["classification"] = [
        "".join(_text(c, part) for part in ("section", "class", "subclass"))
        + f" {_text(c, 'main-group')}/{_text(c, 'subgroup')}"
        for c in root.xpath("*/classifications-ipcr/classification-ipcr")
    ] or [flat(c) for c in root.xpath("*/classification-ipc/main-classification")]
    meta["citations"] = [flat(c) for c in root.xpath("*//patcit/document-id/doc-number")]
    meta["abstract"] = _text(root, "abstract")
    description = root.find("description")
    return Patent(number=number, meta=meta, description=_lines(description) if description is not None else ())


def _text(element: Any, path: str) -> str:
    found = element.find(path)
    return flat(found) if found is not None else ""


_PARAGRAPHS = frozenset(("p", "para", "paragraph"))
_HEADINGS = frozenset(("heading", "h"))


def _lines(element: Any) -> Iterator[Paragraph]:
    """Yield headings and paragraphs in document order, at any depth."""
    for node in element.iter(*_HEADINGS, *_PARAGRAPHS):
        if node.tag in _HEADINGS:
            level = node.get("level") or node.get("lvl") or node.get("LVL") or "1"
            if text := flat(node):
                yield Paragraph(text, max(1, int(level)) if level.isdecimal() and len(level) < 3 else 1)
        elif node.tag in _PARAGRAPHS and next(node.iterancestors(*_PARAGRAPHS), None) is None:
            yield from _paragraph(node)


def _paragraph(node: Any) -> Iterator[Paragraph]:
    for number in node.findall("number"):
        number.text = ""
    tables = []
    for table in [
        t for t in node.iter("table", "table-us") if not any(p.tag in ("table", "table-us") for p in t.iterancestors())
    ]:
        rows, header = table_rows(table)
        tables.append(pipe_table(rows, header))
        _empty(table)
    items = []
    for item in [i for i in node.iter("li") if not any(p.tag == "li" for p in i.iterancestors())]:
        items.append(f"- {flat(item)}")
        _empty(item)
    if text := flat(node):
        yield Paragraph(text)
    for text in [*items, *filter(None, tables)]:
        yield Paragraph(text)


def _empty(element: Any) -> None:
    tail = element.tail
    element.clear()
    element.tail = tail
