"""MediaWiki XML dumps: pages found by their tags in the raw bytes, and the streams of a multistream dump.

In a dump `<` inside a page's text is always written `&lt;`, so `<page>` in the bytes is always the tag: a dump is cut
without parsing, any part can be read alone, and damage costs only its page. A multistream dump is a file of thousands
of bzip2 streams, each with whole pages; they are found by their first bytes, without the index of the dump.
"""

from __future__ import annotations

import bz2
import html
import re
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from piledriver.corpus.document import Refusal
from piledriver.corpus.formats.wikitext.site import ENGLISH_CATEGORIES, ENGLISH_FILES, Site

MAX_PAGE_BYTES = 1 << 26
_CHUNK_BYTES = 1 << 20
_NAMESPACE = re.compile(rb'<namespace key="(-?\d+)"[^>]*>([^<]*)</namespace>')
_NUMBERED = re.compile(r"&#(?:\d{1,7}|x[0-9a-fA-F]{1,6});")
_TEXT = re.compile(rb"<text\b[^>]*>")
# The head of a bzip2 stream and the mark of its first block: 80 bits that do not occur by chance.
_STREAM = re.compile(rb"BZh[1-9]1AY&SY")
_STREAM_BYTES = 10


class Page(msgspec.Struct, frozen=True, gc=False):
    """One page with its newest revision in the dump."""

    title: str
    namespace: int
    id: str
    revision: str
    timestamp: str
    model: str
    redirect: bool
    wikitext: str


def dump_pages(stream: BinaryIO, origin: str, starting_before: int | None = None) -> Iterator[bytes | Refusal]:
    """Yield the bytes of each `<page>...</page>` that starts before an offset of the stream, in constant memory."""
    buffer = bytearray()
    offset = 0  # where the buffer starts in the stream
    at = 0
    while True:
        start = buffer.find(b"<page>", at)
        if start < 0:
            offset += max(at, len(buffer) - 5)
            del buffer[: max(at, len(buffer) - 5)]
            at = 0
            if starting_before is not None and offset >= starting_before:
                return
            chunk = stream.read(_CHUNK_BYTES)
            if not chunk:
                return
            buffer += chunk
            continue
        if starting_before is not None and offset + start >= starting_before:
            return
        searched = start
        while (end := buffer.find(b"</page>", searched)) < 0:
            # Look only at what is new, however long the page is.
            searched = max(start, len(buffer) - 6)
            chunk = stream.read(_CHUNK_BYTES)
            if not chunk:
                yield Refusal("truncated page", f"{origin}@{offset + start}")
                return
            buffer += chunk
            if len(buffer) - start > MAX_PAGE_BYTES:
                break
        if end < 0:
            yield Refusal("page too large", f"{origin}@{offset + start}", f"more than {MAX_PAGE_BYTES} bytes")
            at = start + 6
            continue
        at = end + 7
        yield bytes(buffer[start:at])
        if at > _CHUNK_BYTES:
            offset += at
            del buffer[:at]
            at = 0


def read_page(raw: bytes) -> Page:
    """Return the fields of a page; missing ones are empty."""
    first = raw.find(b"<revision>")
    head = raw[:first] if first >= 0 else raw
    revision = raw[raw.rfind(b"<revision>") :] if first >= 0 else raw
    opening = _TEXT.search(revision)
    content = b""
    if opening is not None and not opening.group().endswith(b"/>"):
        end = revision.rfind(b"</text>")
        content = revision[opening.end() : end if end >= 0 else len(revision)]
    about = revision[: opening.start()] if opening is not None else revision
    return Page(
        title=_field(head, b"title"),
        namespace=int(_field(head, b"ns") or 0),
        id=_field(head, b"id"),
        revision=_field(about, b"id"),
        timestamp=_field(about, b"timestamp"),
        model=_field(about, b"model"),
        redirect=b"<redirect" in head,
        wikitext=_unescaped(content.decode("utf-8", "replace")),
    )


def read_site(head: bytes) -> Site:
    """Return the wiki that the `<siteinfo>` at the head of a dump describes."""
    names: dict[int, str] = {}
    for key, name in _NAMESPACE.findall(head):
        names[int(key)] = _unescaped(name.decode("utf-8", "replace")).lower()
    language = re.search(rb'xml:lang="([^"]+)"', head)
    base = _field(head, b"base")
    # Without names in the head, those of the larger wikis.
    unknown = Site()
    return Site(
        name=_field(head, b"sitename"),
        language=language.group(1).decode("utf-8", "replace") if language else "en",
        url=base[: base.rfind("/") + 1],
        file_names=(ENGLISH_FILES if names else unknown.file_names) | {names[key] for key in (6, -2) if key in names},
        category_names=(ENGLISH_CATEGORIES if names else unknown.category_names)
        | {names[key] for key in (14,) if key in names},
    )


def _field(raw: bytes, tag: bytes) -> str:
    start = raw.find(b"<" + tag + b">")
    if start < 0:
        return ""
    start += len(tag) + 2
    end = raw.find(b"</" + tag + b">", start)
    return _unescaped(raw[start:end].decode("utf-8", "replace")).strip() if end >= 0 else ""


def _unescaped(text: str) -> str:
    if "&" not in text:
        return text
    text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&apos;", "'")
    if "&#" in text:
        text = _NUMBERED.sub(lambda found: html.unescape(found[0]), text)
    return text.replace("&amp;", "&")


def stream_starts(path: str) -> Iterator[int]:
    """Yield the offset of every bzip2 stream in a file."""
    with open(path, "rb") as file:
        offset, kept = 0, b""
        while chunk := file.read(8 * _CHUNK_BYTES):
            window = kept + chunk
            for found in _STREAM.finditer(window):
                yield offset - len(kept) + found.start()
            offset += len(chunk)
            kept = window[-(_STREAM_BYTES - 1) :]


def is_multistream(path: str) -> bool:
    """Return whether the second stream starts with a page: other tools write several streams too, but cut anywhere."""
    starts = stream_starts(path)
    first, second = next(starts, None), next(starts, None)
    if first != 0 or second is None:
        return False
    with open(path, "rb") as file:
        file.seek(second)
        try:
            head = bz2.BZ2Decompressor().decompress(file.read(1 << 20), 4096)
        except (OSError, ValueError):
            return False
    return head.lstrip().startswith((b"<page>", b"</mediawiki>"))


def stream_ranges(path: str, size: int, at_least_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of runs of whole streams."""
    begin = 0
    for start in stream_starts(path):
        if start - begin >= at_least_bytes:
            yield begin, start - begin
            begin = start
    if size > begin:
        yield begin, size - begin
