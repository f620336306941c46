"""OpenWebText2: web pages by the score of their Reddit submissions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.html.extractors import Extractor, extract_page
from piledriver.corpus.formats.html.page import decode_page, page_meta
from piledriver.corpus.raw.limits import read_all
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, stop_at_damage
from piledriver.corpus.sources.openwebtext2.reddit import Submissions, url_key
from piledriver.corpus.sources.shared.warc import MAX_PAGE_BYTES, archive_pieces, is_web_archive, pages_of
from piledriver.corpus.text.data_table import data_table, word_set
from piledriver.corpus.text.language import language_of

MIN_SCORE = 3
_EXCLUDED = data_table(__package__, "excluded.yaml")
EXCLUDED_DOMAINS = word_set(_EXCLUDED["domains"])
EXCLUDED_EXTENSIONS = tuple(f".{extension}" for extension in _EXCLUDED["extensions"].split())
_is_page = ends_with(".html", ".htm", ".xhtml")
_is_json_lines = ends_with(".jsonl", ".ndjson")
_DUMP_NAME = re.compile(r"^RS_|_submissions\b", re.IGNORECASE)
_CANONICAL = re.compile(
    rb"<(?:link|meta)\b[^<>]{0,300}?(?:rel=[\"']?canonical|property=[\"']?og:url)[^<>]{0,300}?(?:href|content)=[\"']?"
    rb"(https?://[^\"'\s<>]{4,2000})",
    re.IGNORECASE,
)
_HEAD_BYTES = 1 << 17


def _wants(name: str) -> bool:
    """Return whether it is a page, a web archive or a Pushshift dump of submissions (`RS_2015-01.zst`, JSON lines)."""
    return is_web_archive(name) or _is_page(name) or _is_submissions(name)


def _is_submissions(name: str) -> bool:
    return _DUMP_NAME.search(name) is not None or _is_json_lines(name)


def _pieces(streams: Iterator[RawStream]) -> Iterator[Piece | Refusal]:
    """Read all dumps, then yield each page that passes; pages are selected here, before they are parsed."""
    with Submissions() as submissions:
        waiting: list[RawStream] = []
        begun = False
        for stream in streams:
            if _is_submissions(stream.name):
                if begun:
                    yield Refusal("submissions after pages", stream.origin, "name the dumps before archives of pages")
                else:
                    yield from stop_at_damage(stream.origin, submissions.add_dump(stream))
            elif stream.path is not None:
                # Files can be deferred until all dumps are read; archive members cannot.
                waiting.append(stream)
            else:
                begun = True
                yield from stop_at_damage(stream.origin, _pages(stream, submissions))
        for stream in waiting:
            yield from stop_at_damage(stream.origin, _pages(stream, submissions))
            stream.close()


def _pages(stream: RawStream, submissions: Submissions) -> Iterator[Piece | Refusal]:
    if not is_web_archive(stream.name):
        content = read_all(stream.file, MAX_PAGE_BYTES)
        found = _CANONICAL.search(content[:_HEAD_BYTES])
        url = found[1].decode("utf-8", "replace") if found else None
        yield _judged(Piece(stream.origin, data=content, extra={}), url, submissions)
        return
    for part in archive_pieces(stream):
        for page in [part] if isinstance(part, Refusal) else pages_of(part):
            if isinstance(page, Refusal):
                yield page
            elif page.status is not None and not 200 <= page.status < 300:
                yield Refusal("http status is not 2xx", page.origin, str(page.status))
            elif "html" not in page.kind and page.kind:
                yield Refusal("not html", page.origin, page.kind[:80])
            else:
                extra = {"date": page.date, "charset": page.charset}
                yield _judged(Piece(page.origin, data=page.content, extra=extra), page.url, submissions)


def _judged(piece: Piece, url: str | None, submissions: Submissions) -> Piece | Refusal:
    """Return the piece with its Reddit metadata, or the refusal."""
    if url is None:
        return Refusal("no url", piece.origin, "it cannot be looked up") if submissions.count else piece
    key = url_key(url)
    if key is None:
        return Refusal("not a web address", piece.origin, url[:200])
    host = key.partition("/")[0].partition(":")[0].partition("?")[0]
    if _is_excluded(host):
        return Refusal("excluded domain", piece.origin, host)
    if key.partition("?")[0].lower().endswith(EXCLUDED_EXTENSIONS):
        return Refusal("excluded extension", piece.origin, url[-200:])
    found = submissions.of(key)
    if submissions.count:
        if found is None:
            return Refusal("not submitted", piece.origin, url[:200])
        if found[0] < MIN_SCORE:
            return Refusal("score below 3", piece.origin, f"{found[0]:g}")
    if not submissions.use(key):
        return Refusal("duplicate url", piece.origin, url[:200])
    extra = {**piece.extra, "url": url, "domain": host, "score": found and found[0], "reddit": found and found[1]}
    return Piece(piece.origin, data=piece.data, extra=extra)


def _is_excluded(host: str) -> bool:
    labels = host.split(".")
    return any(".".join(labels[start:]) in EXCLUDED_DOMAINS for start in range(len(labels) - 1))


def _documents(piece: Piece, *, extractor: Extractor = "piledriver") -> Iterator[Found]:
    """Yield the main content of the page."""
    extra: dict[str, Any] = dict(piece.extra or {})
    html = decode_page(piece.read(), extra.pop("charset", None))
    text = "\n".join(
        line for line in extract_page(html, extractor).split("\n") if line.strip().lower() != "advertisement"
    )
    if not text.strip():
        yield Refusal("no text", piece.origin)
        return
    meta = {**extra, **page_meta(html), "language": language_of(text)}
    yield Document(text, meta={"origin": piece.origin, **{k: v for k, v in meta.items() if v is not None}})


SOURCE = Source(
    slug="openwebtext2",
    name="OpenWebText2",
    title="web pages that Reddit's users linked to with a score of 3 or more",
    raw_format="HTML files or WARC pages, and Pushshift submission dumps (RS_*.zst, .bz2, .xz, .jsonl) for the scores",
    licence="unknown",
    consent="none",
    treatment=(
        "With submission dumps, a page is taken when the scores of all its submissions sum to 3 or more; its "
        "address is the record's, or the canonical one that the page names. Without dumps every page is taken as "
        "already chosen. Self posts, excluded domains (pictures, films, shops, code, social media, Wikipedia) and "
        "extensions are refused, and so is an address that came before. The main content is found by piledriver's "
        "own extractor (the original used Newspaper3k); lines that say only Advertisement go. Scores are kept on "
        "disk while reading, so memory is bounded; name the dumps before archives of pages. All languages are kept, "
        "as in the original."
    ),
    citation="Gao et al. 2020, The Pile, arXiv:2101.00027; Gokaslan and Cohen 2019, OpenWebText",
    wants=_wants,
    pieces=_pieces,
    documents=_documents,
)
