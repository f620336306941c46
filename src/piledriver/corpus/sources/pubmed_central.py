"""PubMed Central: open-access articles in JATS or NLM XML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.jats.article import article_text
from piledriver.corpus.formats.jats.inline import flat
from piledriver.corpus.formats.xml.entities import with_character_entities
from piledriver.corpus.formats.xml.parse import XmlError, parse_xml, strip_namespaces
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, one_piece, per_file
from piledriver.corpus.text.creative_commons import licence_id

_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
_ID_NAMES = {"pmc": "pmcid", "pmcid": "pmcid", "pmid": "pmid", "doi": "doi"}
_COPYRIGHT = re.compile(r"\W*(?:©|\(c\)|copyright\b)", re.IGNORECASE)


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield each article of a file: one, or several in OAI-PMH responses and concatenations."""
    try:
        root = parse_xml(with_character_entities(piece.read()))
    except XmlError as error:
        yield Refusal("invalid xml", piece.origin, str(error))
        return
    strip_namespaces(root)
    articles = [root] if root.tag == "article" else [a for a in root.iter("article") if _top_level(a)]
    if not articles:
        yield Refusal("no article", piece.origin, f"the root is {root.tag}")
    for number, article in enumerate(articles, 1):
        origin = piece.origin if len(articles) == 1 else f"{piece.origin}#{number}"
        yield from _article(article, origin)


def _top_level(article: Any) -> bool:
    return all(parent.tag != "article" for parent in article.iterancestors())


def _article(article: Any, origin: str) -> Iterator[Found]:
    meta = {"origin": origin, **_meta(article)}
    if article.find("body") is None and article.find(".//abstract") is None:
        yield Refusal("no text", origin, "neither abstract nor body")
        return
    yield Document(article_text(article), meta=meta)


def _meta(article: Any) -> dict[str, Any]:
    front = next(iter(article.xpath("front/article-meta")), None)
    if front is None:
        return {}
    meta: dict[str, Any] = {}
    for element in front.findall("article-id"):
        name = _ID_NAMES.get(element.get("pub-id-type", ""))
        if name and element.text and name not in meta:
            meta[name] = element.text.strip()
    if meta.get("pmcid", "").isdecimal():
        meta["pmcid"] = f"PMC{meta['pmcid']}"
    title = front.find(".//article-title")
    journal = article.find(".//journal-title")
    meta["title"] = flat(title) if title is not None else None
    meta["journal"] = flat(journal) if journal is not None else None
    meta["date"] = _date(front)
    meta["article_type"] = article.get("article-type")
    meta["language"] = article.get(_LANGUAGE)
    keywords = [flat(word) for word in front.iterfind("kwd-group/kwd")]
    meta["keywords"] = keywords or None
    meta["licence"] = _licence(front)
    meta["copyright"] = next(map(flat, front.iterfind("permissions/copyright-statement")), None)
    return {name: value for name, value in meta.items() if value}


def _date(front: Any) -> str | None:
    dates = []
    for element in front.findall("pub-date"):
        parts = [element.findtext(name, "").strip() for name in ("year", "month", "day")]
        number = [int(part) for part in parts if part.isdecimal()]
        if number and parts[0].isdecimal():
            dates.append("-".join([f"{number[0]:04d}", *(f"{n:02d}" for n in number[1:])]))
    return min(dates, key=lambda date: (date[:4], -len(date), date)) if dates else None


def _licence(front: Any) -> str | None:
    """Return the licence that the licence element names by URL or in words, else its text; `None` without one.

    A line of copyright is no licence, unless it names one: the licence is then "unknown".
    """
    statements: list[str] = []
    for licence in front.iterfind("permissions/license"):
        statements += [value for name, value in licence.attrib.items() if name.endswith("href")]
        statements += [element.text for element in licence.iter("license_ref") if element.text]
        statements += [
            value for link in licence.iter("ext-link") for name, value in link.attrib.items() if name.endswith("href")
        ]
        statements.append(flat(licence))
    plain = [flat(element) for element in front.iter("copyright-statement")]
    for statement in [*statements, *plain]:
        if found := licence_id(statement):
            return found
    named = [text[:300] for text in statements if text and not _COPYRIGHT.match(text)]
    return named[0] if named else "unknown" if statements or plain else None


SOURCE = Source(
    slug="pubmed-central",
    name="PubMed Central",
    title="open-access articles of biomedicine and the life sciences",
    raw_format="JATS or NLM XML (.nxml, .xml) alone, in the article's tar.gz, in oa_bulk tar.gz, in OAI-PMH answers",
    licence="mixed Creative Commons, per document",
    consent="author",
    treatment=(
        "An article is a document: title, abstracts, body, appendices, acknowledgements and notes, with `#` headings, "
        "lists, pipe tables, captions and `$` formulas (the publisher's TeX, else MathML turned into LaTeX). Authors, "
        "affiliations, graphics and the reference list are left out; citations stay as they are printed. Unlike the "
        "original (pandoc), title and abstract are kept and `{#id}` attributes and `:::` lines never arise. The "
        "licence element gives the licence. Refused: invalid XML, no article, no abstract and no body."
    ),
    wants=ends_with(".nxml", ".xml"),
    pieces=per_file(one_piece),
    documents=_documents,
    citation="https://www.ncbi.nlm.nih.gov/pmc/tools/openftlist/",
)
