"""Pages in web archives: WARC and WET (compressed by record, as one stream, or not), and the older ARC.

A file is cut at multiples of `PIECE_BYTES`, not at records: a worker finds the first record that begins in its range
and reads all that begin before its end, so the file is read once. A damaged record costs only itself.
"""

from __future__ import annotations

import io
import os
import re
import warnings
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import msgspec

from piledriver.core.errors import MissingDependencyError
from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.content_encoding import without_content_encoding
from piledriver.corpus.raw.limits import LimitError, damage_refusal
from piledriver.corpus.raw.streams import FileRange, RawStream, decompressed
from piledriver.corpus.sources.base import Piece, ends_with

PIECE_BYTES = 1 << 22
MAX_PAGE_BYTES = 1 << 24
is_web_archive = ends_with(".warc", ".wet", ".arc")
"""Whether a file is a WARC, WET or ARC, by its name."""
_GZIP = b"\x1f\x8b\x08"
_RECORD = re.compile(rb"WARC/[01]\.\d+\r?\n(?:WARC|Content)-", re.IGNORECASE)
_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_WRONG_LENGTH = "wrong record length"
# The end of a record whose declared length is a few bytes too large.
_RUNS_ON = re.compile(rb"\r\n\r\nW(?:A(?:R(?:C/?)?)?)?\Z")
_SCAN_BYTES = 1 << 20


class WebPage(msgspec.Struct, frozen=True):
    """A server's response: its bytes and what its headers declare."""

    origin: str
    url: str
    date: str
    kind: str
    """The media type, in lower case and without parameters."""
    charset: str | None
    content: bytes
    status: int | None = None
    truncated: bool = False


def archive_pieces(stream: RawStream) -> Iterator[Piece | Refusal]:
    """Yield ranges of a local file; of an archive member one piece for each page."""
    if stream.path is None:
        pages = _arc_pages(stream.file, stream.origin) if _is_arc(stream.name) else _pages(stream.file, stream.origin)
        for page in pages:
            yield page if isinstance(page, Refusal) else Piece(page.origin, data=page.content, extra=_described(page))
        return
    size = os.path.getsize(stream.path)
    if _is_arc(stream.name) or not _is_cut(stream.path):
        yield Piece(stream.origin, path=stream.path, extra="arc" if _is_arc(stream.name) else "warc")
        return
    for start in range(0, size, PIECE_BYTES):
        yield Piece(stream.origin, path=stream.path, offset=start, length=min(PIECE_BYTES, size - start), extra="warc")


def pages_of(piece: Piece) -> Iterator[WebPage | Refusal]:
    """Yield the pages of a piece, in the order of the file."""
    if isinstance(piece.extra, dict):
        assert piece.data is not None
        yield WebPage(origin=piece.origin, content=piece.data, **piece.extra)
    elif piece.extra == "arc":
        yield from _arc_pages(piece.open(), piece.origin)
    else:
        yield from _pages_in_part(piece)


def _described(page: WebPage) -> dict[str, Any]:
    return {name: getattr(page, name) for name in WebPage.__struct_fields__ if name not in ("origin", "content")}


def _is_arc(name: str) -> bool:
    return ".arc" in name.lower()[-8:]


def _is_cut(path: str) -> bool:
    """Return whether records can be found from the middle, which one long compressed stream does not allow."""
    with open(path, "rb") as file:
        head = file.read(_SCAN_BYTES)
    if not head.startswith(_GZIP):
        return head[:5].upper() == b"WARC/"
    inflate = zlib.decompressobj(31)
    first = b""
    try:
        for at in range(0, len(head), 1 << 8):
            first += inflate.decompress(head[at : at + (1 << 8)])
            if inflate.eof or len(first) > 1 << 24:
                break
    except zlib.error:
        return len(_RECORD.findall(first)) <= 1
    return inflate.eof and len(_RECORD.findall(first)) <= 1


def _pages_in_part(piece: Piece) -> Iterator[WebPage | Refusal]:
    if piece.path is None or piece.length is None:
        raw = piece.open_raw()
        # Also a single gzip stream, because fastwarc loses everything before a damaged byte; it decompresses archives
        # that are compressed by record itself.
        packed = raw.read(6).startswith((b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", _GZIP))
        raw.seek(0)
        yield from _pages(decompressed(raw, piece.origin) if packed else raw, piece.origin)
        return
    end = piece.offset + piece.length
    with open(piece.path, "rb") as file:
        compressed = file.read(3) == _GZIP
        at = _next_record(file, piece.offset, end, compressed)
        damage: Refusal | None = None
        while at is not None:
            # After an error the last position reached is known; the damaged record is the one after it.
            reached, first = at, True
            try:
                for position, page in _records(cast(BinaryIO, FileRange(piece.path, at)), piece.origin, at):
                    if damage is not None:
                        yield damage
                    damage = None
                    if position >= end:
                        return
                    reached, first = position, False
                    if page is not None:
                        yield page
                    if not isinstance(page, Refusal):
                        continue
                    if page.reason == _WRONG_LENGTH or (compressed and page.reason == LimitError.reason):
                        # A wrong length may include other records, and a compressed record that is too large may be a
                        # bomb: search for the next record from its beginning instead of reading it to its end.
                        break
                else:
                    if reached == 0 and first:
                        yield Refusal("no records", piece.origin)
                    return
            except (OSError, ValueError, RuntimeError) as error:
                where = f"{piece.origin}#{reached}" if first else f"{piece.origin}#after {reached}"
                damage = damage_refusal(where, error, "damaged record")
                if first:
                    yield damage
                    damage = None
            at = _next_record(file, reached + 1, end, compressed)
        if damage is not None:
            yield damage


def _next_record(file: BinaryIO, start: int, end: int, compressed: bool) -> int | None:
    """Return the position of the first record in [start, end), or `None`."""
    if start == 0:
        return 0
    file.seek(start)
    place, window = start, b""
    while place < end:
        block = file.read(_SCAN_BYTES)
        window += block
        at = 0
        while True:
            if compressed:
                at = window.find(_GZIP, at)
            else:
                found = _RECORD.search(window, at)
                at = found.start() if found else -1
            if at < 0 or place + at >= end:
                break
            if not compressed or _inflates_to_record(window[at : at + 2048]):
                return place + at
            at += 1
        if not block:
            return None
        # The beginning of a record may span two blocks.
        keep = min(len(window), 2048)
        place += len(window) - keep
        window = window[len(window) - keep :]
    return None


def _inflates_to_record(content: bytes) -> bool:
    try:
        return zlib.decompressobj(31).decompress(content, 16)[:5].upper() == b"WARC/"
    except zlib.error:
        return False


def _pages(stream: BinaryIO, origin: str) -> Iterator[WebPage | Refusal]:
    found = False
    try:
        for _, page in _records(stream, origin, 0):
            found = True
            if page is not None:
                yield page
        if not found:
            yield Refusal("no records", origin)
    except (OSError, ValueError, RuntimeError) as error:
        yield damage_refusal(origin, error, "damaged archive")


def _records(stream: BinaryIO, origin: str, base: int) -> Iterator[tuple[int, WebPage | Refusal | None]]:
    try:
        with warnings.catch_warnings():
            # fastwarc warns about its own deprecated modules at import.
            warnings.simplefilter("ignore", DeprecationWarning)
            from fastwarc.warc import ArchiveIterator
    except ImportError as error:
        raise MissingDependencyError("fastwarc", extra="corpus", purpose="reading WARC files") from error
    seekable = stream if stream.seekable() else cast(BinaryIO, _Forward(stream))
    try:
        # No decoding of bodies: fastwarc fails on a record that wrongly declares chunks, as Common Crawl's before 2018
        # do, and loses the records after a compressed body inside chunks.
        for record in ArchiveIterator(seekable, parse_http=True, auto_decode="none", quirks_mode=True):
            position = base + record.stream_pos
            yield position, _page(record, f"{origin}#{position}")
    except BaseException as error:
        # A panic of the native reader is not an `Exception` and would end the whole extraction.
        if type(error).__name__ == "PanicException":
            raise ValueError(f"fastwarc failed: {error}") from None
        raise


class _Forward(io.BufferedIOBase):
    """A stream that seeks forward by reading, for a reader that asks for its position and skips by seeking."""

    def __init__(self, inner: BinaryIO) -> None:
        self._inner, self._at = inner, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        content = self._inner.read(-1 if size is None else size)
        self._at += len(content)
        return content

    read1 = read

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        target = offset + (self._at if whence == io.SEEK_CUR else 0)
        if whence == io.SEEK_END or target < self._at:
            raise io.UnsupportedOperation("seek")
        while self._at < target and self.read(min(target - self._at, _SCAN_BYTES)):
            pass
        return self._at


def _page(record: Any, origin: str) -> WebPage | Refusal | None:
    kind = str(record.record_type)
    if kind not in ("response", "resource", "conversion"):
        too_large = record.content_length > MAX_PAGE_BYTES
        return Refusal(LimitError.reason, origin, f"{record.content_length} bytes of {kind}") if too_large else None
    headers = record.headers
    url = (headers.get("WARC-Target-URI") or "").strip("<> ")
    origin = f"{origin} {url}" if url else origin
    status = None
    if kind == "response" and record.http_headers is not None:
        media, charset = record.http_content_type or "", record.http_charset
        status = record.http_headers.status_code
    else:
        declared = headers.get("Content-Type") or ""
        media, found = declared.partition(";")[0], _CHARSET.search(declared)
        charset = found[1] if found else None
    if kind == "resource" and "html" not in media.lower():
        # Crawlers keep their logs and arguments in resources of plain text.
        return Refusal("not a page", origin, media[:80])
    content = record.reader.read(MAX_PAGE_BYTES + 1)
    cut = len(content) < record.content_length <= MAX_PAGE_BYTES
    if cut or b"\r\n\r\nWARC/1." in content or _RUNS_ON.search(content):
        return Refusal(_WRONG_LENGTH, origin, f"{record.content_length} bytes are declared")
    if status is not None:
        if "chunked" in (record.http_headers.get("Transfer-Encoding") or "").lower():
            content = _unchunked(content)
        content = without_content_encoding(content, record.http_headers.get("Content-Encoding") or "", MAX_PAGE_BYTES)
    if len(content) > MAX_PAGE_BYTES:
        return Refusal(LimitError.reason, origin, f"more than {MAX_PAGE_BYTES} bytes")
    page = WebPage(
        origin=origin,
        url=url,
        date=headers.get("WARC-Date") or "",
        kind=media.strip().lower(),
        charset=charset,
        content=content,
        status=status,
        truncated=headers.get("WARC-Truncated") is not None,
    )
    # Some writers do not declare that the block is HTTP.
    return _answered(page) if status is None and content.startswith(b"HTTP/") else page


def _arc_pages(stream: BinaryIO, origin: str) -> Iterator[WebPage | Refusal]:
    """Yield the records of an ARC: a line `url ip date type length`, then the bytes. URLs may contain spaces."""
    place = 0
    found = False
    while line := stream.readline(1 << 16):
        start, place = place, place + len(line)
        fields = line.decode("latin-1").strip().rsplit(" ", 4)
        if len(fields) < 5:
            continue
        found = True
        url, _, date, kind, size = fields
        where = f"{origin}#{start} {url}"
        if not size.isascii() or not size.isdecimal():
            if url.startswith(("filedesc:", "URL")):
                continue
            yield Refusal("bad record length", where, size[:40])
            continue
        length = int(size)
        content = stream.read(min(length, MAX_PAGE_BYTES + 1))
        place += length
        if 100 * len(content) < 99 * min(length, MAX_PAGE_BYTES + 1):
            # A few missing bytes are tolerated: some addresses were edited after the length was counted.
            yield Refusal("truncated record", where, f"{len(content)} of {length} bytes")
            continue
        if length > MAX_PAGE_BYTES:
            left = length - len(content)
            while left > 0 and (skipped := stream.read(min(left, _SCAN_BYTES))):
                left -= len(skipped)
            yield Refusal(LimitError.reason, where, f"{length} bytes")
        elif not url.startswith(("filedesc:", "dns:")):
            yield _arc_page(where, url, date, kind, content)
    if not found:
        yield Refusal("no records", origin)


def _arc_page(origin: str, url: str, date: str, kind: str, content: bytes) -> WebPage:
    if len(date) >= 14 and date[:14].isdecimal():
        date = f"{date[:4]}-{date[4:6]}-{date[6:8]}T{date[8:10]}:{date[10:12]}:{date[12:14]}Z"
    page = WebPage(origin=origin, url=url, date=date, kind=kind.lower(), charset=None, content=content)
    return _answered(page) if content.startswith(b"HTTP/") else page


def _answered(page: WebPage) -> WebPage:
    """Return the page without the HTTP header that its content still begins with."""
    head, found, body = page.content.partition(b"\r\n\r\n")
    if not found:
        head, _, body = page.content.partition(b"\n\n")
    header = head.decode("latin-1")
    charset, code = _CHARSET.search(header), header.split(None, 2)[1:2]
    media = re.search(r"^content-type:[ \t]*([^;\r\n]{1,200})", header, re.IGNORECASE | re.MULTILINE)
    encoding = re.search(r"^content-encoding:[ \t]*([^\r\n]{1,100})", header, re.IGNORECASE | re.MULTILINE)
    content = _unchunked(body) if "chunked" in header.lower() else body
    return msgspec.structs.replace(
        page,
        kind=media[1].strip().lower() if media else page.kind,
        charset=charset[1] if charset else None,
        status=int(code[0]) if code and code[0].isdecimal() else None,
        content=without_content_encoding(content, encoding[1] if encoding else "", MAX_PAGE_BYTES),
    )


def _unchunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while True:
        end = body.find(b"\r\n", at)
        try:
            size = int(body[at:end].split(b";")[0], 16) if at <= end < at + 20 else -1
        except ValueError:
            size = -1
        if size < 0:
            # Not (or no longer) chunked: keep the rest unchanged.
            parts.append(body[at:])
            break
        if size == 0:
            break
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(parts)
