"""Wikipedia: MediaWiki XML dumps, plain, compressed or multistream, and single pages of wikitext."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, cast

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.wikitext.convert import ENGLISH, wikitext_to_text
from piledriver.corpus.formats.wikitext.dump import (
    Page,
    dump_pages,
    is_multistream,
    read_page,
    read_site,
    stream_ranges,
)
from piledriver.corpus.formats.wikitext.site import Site
from piledriver.corpus.raw.limits import read_all
from piledriver.corpus.raw.partial_reads import peek_head
from piledriver.corpus.raw.streams import FileRange, RawStream
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, group_by_size, per_file, stop_at_damage
from piledriver.corpus.text.normalise import decode_text

RANGE_BYTES = 1 << 24
BATCH_BYTES = 1 << 22
# MediaWiki itself takes no page beyond two megabytes.
MAX_CHARACTERS = 1 << 23
_HEAD_BYTES = 1 << 16
# The date on which the text of Wikipedia went from version 3.0 to 4.0 of its licence.
_NEW_LICENCE = "2023-06-07"

_REDIRECT = re.compile(r"\s*#\s*[^\W\d]+\s*:?\s*\[\[")
_DISAMBIGUATION = re.compile(
    r"\{\{\s*(?:disambig(?:uation)?|dab|disamb|hndis|geodis|place name disambiguation|human name disambiguation|"
    r"hospital disambiguation|letter-number ?combdisambig|mathdab|numberdis|roaddis|schooldis|school disambiguation|"
    r"shipindex|airport disambig(?:uation)?|callsigndis|genus disambiguation|species latin name disambiguation|"
    r"begriffsklärung|homonymie|desambiguação|desambiguación|disambigua|doorverwijzing|неоднозначность)"
    r"(?:[ -](?:cleanup|geo|name))?\s*[|}]",
    re.IGNORECASE,
)

_named_like_a_page = ends_with(".xml", ".wikitext", ".mediawiki", ".wiki", ".txt")
# Large dumps come in parts: enwiki-20240101-pages-articles1.xml-p1p41242.bz2.
_PART = re.compile(r"\.xml-p\d+p\d+")


@dataclass(frozen=True, kw_only=True)
class _Part:
    """How to read the bytes of a piece."""

    kind: Literal["range", "pages", "wikitext"]
    site: Site = ENGLISH
    length: int | None = None
    """For a range, the offset before which its last page starts."""


def _wants(name: str) -> bool:
    """Return whether it is a dump or a page; the index, titles and checksums published beside a dump are not."""
    lowered = name.lower()
    beside = any(word in lowered for word in ("-index", "sums.txt", "-abstract", "all-titles"))
    return not beside and (_named_like_a_page(name) or _PART.search(lowered) is not None)


def _split(stream: RawStream) -> Iterator[Piece | Refusal]:
    """Yield the parts of a dump: ranges of a plain file, runs of bzip2 streams, or batches of pages."""
    head, opened = peek_head(stream.file, _HEAD_BYTES)
    with opened:
        if b"<mediawiki" not in head[:4096] and b"<page>" not in head:
            yield Piece(stream.origin, data=read_all(opened, MAX_CHARACTERS), extra=_Part(kind="wikitext"))
            return
        site = read_site(head)
        if stream.path is not None:
            size = os.path.getsize(stream.path)
            with open(stream.path, "rb") as raw:
                compressed = raw.read(_HEAD_BYTES) != head
            if not compressed:
                # Each worker finds the first page of its range.
                for offset in range(0, size, RANGE_BYTES):
                    part = _Part(kind="range", site=site, length=RANGE_BYTES)
                    yield Piece(stream.origin, path=stream.path, offset=offset, extra=part)
                return
            if is_multistream(stream.path):
                part = _Part(kind="pages", site=site)
                for offset, length in stream_ranges(stream.path, size, BATCH_BYTES // 2):
                    yield Piece(stream.origin, path=stream.path, offset=offset, length=length, extra=part)
                return
        part = _Part(kind="pages", site=site)
        for batch in group_by_size(stop_at_damage(stream.origin, dump_pages(opened, stream.origin)), len, BATCH_BYTES):
            yield batch if isinstance(batch, Refusal) else Piece(stream.origin, data=b"".join(batch), extra=part)


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield every article in a piece."""
    part: _Part = piece.extra
    if part.kind == "wikitext":
        yield _single(piece)
        return
    if part.kind == "range":
        assert piece.path is not None
        opened = cast(BinaryIO, FileRange(piece.path, piece.offset, None))
    else:
        opened = piece.open_raw() if piece.data is not None else piece.open()
    with opened:
        for raw in dump_pages(opened, piece.origin, part.length):
            yield raw if isinstance(raw, Refusal) else article(raw, piece.origin, part.site)


def article(raw: bytes, origin: str, site: Site) -> Found:
    """Return the document of a page of a dump, or the refusal."""
    try:
        page = read_page(raw)
    except ValueError as error:
        return Refusal("malformed page", origin, str(error))
    where = f"{origin}#{page.id}"
    reason = _why_not(page)
    if reason is not None:
        return Refusal(reason, where, page.title)
    if len(page.wikitext) > MAX_CHARACTERS:
        return Refusal("page too large", where, f"more than {MAX_CHARACTERS} characters")
    text = wikitext_to_text(page.wikitext, site, page.title)
    if not text:
        return Refusal("no text", where, page.title)
    licence = "CC-BY-SA-4.0" if page.timestamp[:10] >= _NEW_LICENCE else "CC-BY-SA-3.0"
    meta: dict[str, Any] = {"origin": where, "licence": licence, "title": page.title, "page_id": page.id}
    meta |= {"revision_id": page.revision, "timestamp": page.timestamp, "language": site.language}
    if site.url:
        meta["url"] = site.url + page.title.replace(" ", "_")
    return Document(f"{page.title}\n\n{text}", meta={key: value for key, value in meta.items() if value})


def _why_not(page: Page) -> str | None:
    if page.namespace != 0:
        return "not an article"
    if page.redirect or _REDIRECT.match(page.wikitext[:200]):
        return "redirect"
    if page.model and page.model != "wikitext":
        return "not wikitext"
    return "disambiguation page" if is_disambiguation(page.title, page.wikitext) else None


def is_disambiguation(title: str, wikitext: str) -> bool:
    """Return whether a page only lists the pages that a name may mean."""
    return title.endswith("(disambiguation)") or _DISAMBIGUATION.search(wikitext) is not None


def _single(piece: Piece) -> Found:
    wikitext = decode_text(piece.read())
    if "<" not in wikitext and "&lt;ref" in wikitext:
        # Cut out of a dump and still escaped.
        wikitext = wikitext.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")
    title = os.path.splitext(os.path.basename(piece.origin.rpartition("!")[2]))[0].replace("_", " ")
    if _REDIRECT.match(wikitext[:200]):
        return Refusal("redirect", piece.origin)
    if is_disambiguation(title, wikitext):
        return Refusal("disambiguation page", piece.origin)
    text = wikitext_to_text(wikitext, title=title)
    if not text:
        return Refusal("no text", piece.origin)
    return Document(f"{title}\n\n{text}", meta={"origin": piece.origin, "licence": "CC-BY-SA-4.0", "title": title})


SOURCE = Source(
    slug="wikipedia-en",
    name="Wikipedia (en)",
    title="encyclopedia articles",
    raw_format=(
        "MediaWiki XML dump (pages-articles), plain, .bz2, multistream .bz2, .gz, .zst; or single wikitext files"
    ),
    licence="CC-BY-SA-4.0",
    consent="author",
    treatment=(
        "Title, blank line, text, as in the original; the newest revision in the dump. Our own converter keeps "
        "headings, paragraphs, lists, table rows, formulas (LaTeX between dollar signs), code and templates that "
        "stand for words (languages, dates, measures, quotations, works in bibliographies); it leaves out "
        "references, pictures with their captions, galleries, infoboxes, navigation, categories and links to "
        "other languages, and headings with nothing under them. Refused with their reason: redirects, pages "
        "outside the article namespace, disambiguation pages, pages in other content models, empty pages. The "
        "licence is that of the revision's date (3.0, and 4.0 since 2023-06-07). Multistream files are cut at "
        "their streams and plain ones at byte ranges, which workers read themselves. Measures are not converted "
        "and ages not computed: only what editors wrote is shown."
    ),
    citation="Wikipedia contributors; tfds wikipedia/20200301.en in The Pile (arXiv:2101.00027)",
    wants=_wants,
    pieces=per_file(_split),
    documents=_documents,
)
