"""PubMed Abstracts: titles and abstracts of MEDLINE's citations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.jats.inline import flat
from piledriver.corpus.formats.xml.entities import with_character_entities
from piledriver.corpus.formats.xml.parse import XmlError, parse_xml
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, per_file
from piledriver.corpus.sources.shared.record_pieces import record_pieces
from piledriver.corpus.text.normalise import decode_text

# How a record opens and closes in the XML files (of old ones: without the envelope).
_OPENING = re.compile(rb"<(PubmedArticle|PubmedBookArticle|MedlineCitation)[\s>]")
_ENDS = (b"</PubmedArticle>", b"</MedlineCitation>")
_TEXT_START = b"\n\nPMID- "
_NAMESPACED = re.compile(rb"<(/?)mml:")
_FIELD = re.compile(r"([A-Z]{2,4}) {0,2}- (.*)")
_is_xml, _is_text = ends_with(".xml", ".nbib"), ends_with(".txt")


def _last_end(buffer: bytes) -> int:
    for end in _ENDS:
        found = buffer.rfind(end)
        if found >= 0:
            return found + len(end)
    found = buffer.rfind(_TEXT_START)
    return found + 2 if found >= 0 else 0


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield each citation; one that cannot be parsed costs only itself."""
    content = piece.read()
    if content.lstrip()[:6] in (b"PMID- ", b"\xef\xbb\xbfPMI"):
        for record in re.split(r"\r?\n\r?\n(?=PMID- )", decode_text(content).strip()):
            yield _from_text(record, piece.origin)
        return
    found_any = False
    # Formulas come with a prefix that only the file's head declares.
    content = _NAMESPACED.sub(rb"<\1", content) if b"<mml:" in content else content
    for start, record in _records(content):
        found_any = True
        number = piece.offset + start
        try:
            root = parse_xml(with_character_entities(_without_lists(record)))
        except XmlError as error:
            yield Refusal("invalid xml", f"{piece.origin}#{number}", str(error))
            continue
        yield _from_xml(root, piece.origin, number)
    if not found_any and b"<PubmedArticleSet" not in content and b"</" not in content[-200:]:
        yield Refusal("no citations", piece.origin)


def _records(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (position, bytes) of each record; the parser rejects one that never closes."""
    at = 0
    while found := _OPENING.search(content, at):
        closing = b"</" + found[1] + b">"
        end = content.find(closing, found.end())
        at = end + len(closing) if end >= 0 else len(content)
        yield found.start(), content[found.start() : at]


def _without_lists(record: bytes) -> bytes:
    """Return a record without its longest lists, which are not used and would take most of the parsing time."""
    for name in (b"AuthorList", b"ReferenceList", b"MeshHeadingList"):
        start, end = record.find(b"<" + name), record.rfind(b"</" + name + b">")
        if 0 < start < end:
            record = record[:start] + record[end + len(name) + 3 :]
    return record


def _from_xml(record: Any, origin: str, number: int) -> Found:
    citation = record if record.tag == "MedlineCitation" else record.find("MedlineCitation")
    if citation is None:
        return Refusal("not a journal article", f"{origin}#{number}")
    pmid = citation.findtext("PMID", "").strip()
    origin = f"{origin}#{pmid or number}"
    article = citation.find("Article")
    if not pmid or article is None:
        return Refusal("no pmid", origin)
    if _pmc_id(record, citation):
        return Refusal("in pubmed central", origin)
    title = next(map(flat, article.iterfind("ArticleTitle")), "")
    if not title:
        return Refusal("no title", origin)
    text = " ".join(filter(None, map(_part, article.iterfind("Abstract[1]/AbstractText"))))
    if not text:
        return Refusal("no abstract", origin)
    journal = article.find("Journal")
    meta = {
        "origin": origin,
        "pmid": pmid,
        "language": article.findtext("Language"),
        "journal": journal.findtext("Title") if journal is not None else None,
        "date": _year(journal) if journal is not None else None,
        "doi": next((e.text for e in record.iterfind("PubmedData/ArticleIdList/ArticleId[@IdType='doi']")), None),
    }
    return Document(f"{title}\n{text}", meta={name: value for name, value in meta.items() if value})


def _pmc_id(record: Any, citation: Any) -> bool:
    # Only the article's own ids: since 2019 its references carry theirs in the same elements further down.
    if record.find("PubmedData/ArticleIdList/ArticleId[@IdType='pmc']") is not None:
        return True
    return any((other.text or "").strip().startswith("PMC") for other in citation.findall("OtherID"))


def _part(element: Any) -> str:
    text = flat(element)
    label = (element.get("Label") or "").strip()
    if not text or not label or label.upper() in ("UNLABELLED", "UNASSIGNED"):
        return text
    return text if text.upper().startswith(f"{label.upper()}:") else f"{label}: {text}"


def _year(journal: Any) -> str | None:
    date = journal.find("JournalIssue/PubDate")
    if date is None:
        return None
    year: str = date.findtext("Year", "") or (date.findtext("MedlineDate", "") or "")[:4]
    return year if year.isdecimal() else None


def _from_text(record: str, origin: str) -> Found:
    """Return the document of a record in text format: fields of four letters, continuation lines indented."""
    values: dict[str, list[str]] = {}
    name = ""
    for line in record.split("\n"):
        if found := _FIELD.match(line):
            name = found[1]
            values.setdefault(name, []).append(found[2].strip())
        elif name and line.startswith("      "):
            values[name][-1] += f" {line.strip()}"
    first = {key: found[0] for key, found in values.items()}
    origin = f"{origin}#{first.get('PMID', '')}"
    if "PMID" not in first:
        return Refusal("no pmid", origin)
    if "PMC" in first:
        return Refusal("in pubmed central", origin)
    if not first.get("TI"):
        return Refusal("no title", origin)
    if not first.get("AB"):
        return Refusal("no abstract", origin)
    text = f"{' '.join(first['TI'].split())}\n{' '.join(first['AB'].split())}"
    meta = {"origin": origin, "pmid": first["PMID"], "language": first.get("LA"), "journal": first.get("JT")}
    return Document(text, meta={name: value for name, value in meta.items() if value})


def _wants(name: str) -> bool:
    """Return whether it is a baseline or update file, or an export of PubMed."""
    return _is_xml(name) or ("pubmed" in name.lower() and _is_text(name))


SOURCE = Source(
    slug="pubmed-abstracts",
    name="PubMed Abstracts",
    title="titles and abstracts of PubMed",
    raw_format="PubMed baseline and update XML (.xml.gz), older MEDLINE XML, and PubMed's text export",
    licence="NLM terms",
    consent="author",
    treatment=(
        "A citation with title and abstract is a document: the title, a newline, the abstract with white space "
        "collapsed and the labels of its sections (BACKGROUND: ...) kept, which the original lost. "
        "CopyrightInformation is left out. Refused: no title, no abstract, and whatever has an id of PubMed Central, "
        "for its full text is there. Only the article's own ids count, not those of its references."
    ),
    wants=_wants,
    pieces=per_file(partial(record_pieces, last_cut=_last_end)),
    documents=_documents,
    citation="https://pubmed.ncbi.nlm.nih.gov/download/",
)
