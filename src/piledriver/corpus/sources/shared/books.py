"""Books as EPUB: the chapters in the order of the spine, and what the package says about the book."""

from __future__ import annotations

import functools
import io
import posixpath
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from lxml import etree

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.gutenberg import without_boilerplate
from piledriver.corpus.formats.html.convert import fragment_to_text, remove, remove_unseen
from piledriver.corpus.formats.html.fast.convert import plain_text
from piledriver.corpus.formats.html.page import decode_page
from piledriver.corpus.formats.html.render import render
from piledriver.corpus.formats.html.scripts import words
from piledriver.corpus.formats.xml.entities import with_character_entities
from piledriver.corpus.sources.base import Found, Piece
from piledriver.corpus.text.creative_commons import licence_id

MAX_MEMBER_BYTES = 1 << 25
MAX_BOOK_BYTES = 1 << 27
MAX_CHAPTERS = 20_000
# Of what stands before each file in the archive: the mark, how long its name is and what is added to it.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_FONT_OBFUSCATION = (b"http://www.idpf.org/2008/embedding", b"http://ns.adobe.com/pdf/enc#RC")
_XMLNS = re.compile(rb"\sxmlns\s*=\s*(?:\"[^\"]{0,300}\"|'[^']{0,300}')")
_UTF8 = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml(?![^>]*encoding=[\"'](?!utf-8))|<(?:!DOCTYPE|html))", re.IGNORECASE)
# Anchors with nothing in them, where a page of print began.
_EMPTY_ANCHORS = re.compile(rb"(?:\s*<a\s[^<>]*(?:/>|></a>))*\s*")
_KIND = re.compile(rb":type\s*=\s*[\"']([^\"'<>]*)")
_DOCTYPE = re.compile(rb"<!DOCTYPE[^>\[]{0,1000}>", re.IGNORECASE)
_EPUB_TYPE = "{http://www.idpf.org/2007/ops}type"
# Parts of a book that are no text of it.
_NO_TEXT = words("toc landmarks page-list loi lot colophon imprint copyright-page cover pagebreak halftitlepage")
_CHAPTER_KINDS = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml", "text/x-oeb1-document")


def book_documents(piece: Piece) -> Iterator[Found]:
    """The one book of an EPUB file, or why it cannot be read."""
    try:
        content = piece.read()
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            yield _book(_Members(archive, content), piece.origin)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        yield Refusal("damaged epub", piece.origin, str(error))
    except etree.XMLSyntaxError as error:
        yield Refusal("invalid xml", piece.origin, str(error))


def _book(members: _Members, origin: str) -> Found:
    if members.find(_ENCRYPTION) and _is_locked(members.read(_ENCRYPTION)):
        return Refusal("encrypted", origin, "it has digital rights management")
    package_path = _package_path(members)
    if package_path is None:
        return Refusal("no package", origin, "there is no .opf file in it")
    package = etree.fromstring(with_character_entities(members.read(package_path)), _xml_parser())
    texts: list[str] = []
    for path in _spine(package, package_path)[:MAX_CHAPTERS]:
        if members.find(path):
            texts.append(chapter_text(members.read(path)))
    text = without_boilerplate("\n\n".join(chapter for chapter in texts if chapter.strip()))
    if not text.strip():
        return Refusal("no text", origin, f"{len(texts)} chapters")
    return Document(text, meta={"origin": origin, **_meta(package)})


class _Members:
    """The files of the archive under the names that the package uses, and no more bytes of them than a book has."""

    def __init__(self, archive: zipfile.ZipFile, packed: bytes) -> None:
        self._archive, self._packed = archive, packed
        self._names = {name.lower(): name for name in archive.namelist()} | {n: n for n in archive.namelist()}
        self._left = MAX_BOOK_BYTES

    def find(self, path: str) -> str | None:
        return self._names.get(path) or self._names.get(path.lower())

    def ending(self, suffix: str) -> str | None:
        return next((name for name in self._archive.namelist() if name.lower().endswith(suffix)), None)

    def read(self, path: str) -> bytes:
        name = self.find(path)
        if name is None:
            raise zipfile.BadZipFile(f"{path} is missing")
        limit = min(MAX_MEMBER_BYTES, self._left)
        content = self._inflated(name, limit)
        if content is None:
            with self._archive.open(name) as file:
                content = file.read(limit + 1)
        if len(content) > limit:
            raise zipfile.BadZipFile(f"{path} is larger than {limit} bytes")
        self._left -= len(content)
        return content

    def _inflated(self, name: str, limit: int) -> bytes | None:
        """A member as nearly all are, in half of the time that `zipfile` takes; None for it to read, or to say what is
        wrong.
        """
        member = self._archive.getinfo(name)
        if member.compress_type != zipfile.ZIP_DEFLATED or member.flag_bits & 1:
            return None
        header = self._packed[member.header_offset : member.header_offset + _LOCAL_HEADER.size]
        if len(header) < _LOCAL_HEADER.size:
            return None
        mark, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        start = member.header_offset + len(header) + name_bytes + extra_bytes
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            content = inflate.decompress(self._packed[start : start + member.compress_size], limit + 1)
        except zlib.error:
            return None
        whole = mark == b"PK\3\4" and inflate.eof and zlib.crc32(content) == member.CRC
        return content if whole and len(content) == member.file_size else None


def _is_locked(encryption: bytes) -> bool:
    methods = re.findall(rb"EncryptionMethod[^>]{0,200}Algorithm\s*=\s*[\"']([^\"']{1,200})", encryption)
    return any(method not in _FONT_OBFUSCATION for method in methods)


def _package_path(members: _Members) -> str | None:
    if members.find(_CONTAINER):
        try:
            container = etree.fromstring(members.read(_CONTAINER), _xml_parser())
            for rootfile in container.iter("{*}rootfile"):
                path = unquote(rootfile.get("full-path") or "")
                if members.find(path):
                    return path
        except etree.XMLSyntaxError:
            pass
    return members.ending(".opf")


def _spine(package: Any, package_path: str) -> list[str]:
    """The paths of the chapters; where the spine is empty, all documents in the order of the manifest."""
    folder = posixpath.dirname(package_path)
    items: dict[str, str] = {}
    skipped: set[str] = set()
    for item in package.iter("{*}item"):
        name, href = item.get("id") or "", item.get("href")
        if href is None or (item.get("media-type") or _CHAPTER_KINDS[0]).lower() not in _CHAPTER_KINDS:
            continue
        items[name] = posixpath.normpath(posixpath.join(folder, unquote(href.partition("#")[0])))
        if "nav" in (item.get("properties") or "").split():
            skipped.add(name)
    for reference in package.iter("{*}reference"):
        if (reference.get("type") or "").lower() in ("toc", "cover"):
            path = posixpath.normpath(posixpath.join(folder, unquote((reference.get("href") or "").partition("#")[0])))
            skipped |= {name for name, known in items.items() if known == path}
    order = [ref.get("idref") or "" for ref in package.iter("{*}itemref")]
    chosen = [name for name in dict.fromkeys(order) if name in items and name not in skipped]
    return [items[name] for name in chosen or items if name not in skipped or not chosen]


def chapter_text(content: bytes) -> str:
    """A chapter: as XML, where empty elements close themselves, else as the HTML that it then must be."""
    text = _plain_chapter(content)
    if text is not None:
        return text
    try:
        root = etree.fromstring(_DOCTYPE.sub(b"", _XMLNS.sub(b"", with_character_entities(content))), _xml_parser())
    except (etree.XMLSyntaxError, ValueError):
        return fragment_to_text(decode_page(content))
    for element in root.iter("{*}*"):
        if element.tag[0] == "{":
            element.tag = element.tag.rpartition("}")[2]
    for element in root.xpath("//*[@*[local-name()='type']]"):
        kinds = (element.get(_EPUB_TYPE) or "").split()
        if not _NO_TEXT.isdisjoint(kinds):
            if element.tag in ("body", "html"):
                return ""
            remove(element)
        elif "noteref" in kinds and not len(element) and (element.text or "").strip().isdigit():
            # The number of a note would be one with the word before it.
            element.text = f"[{element.text.strip()}]"
    remove_unseen(root, content)
    body = root.find("body")
    return render(root if body is None else body)


def _plain_chapter(content: bytes) -> str | None:
    """The text of a chapter that is plain enough to be read without a tree."""
    start = content.find(b">", content.find(b"<body")) + 1
    begin = _EMPTY_ANCHORS.match(content, start)
    if not start or begin is None or content[begin.end() : begin.end() + 1] != b"<" or not _UTF8.match(content):
        return None
    if b":type" in content:
        kinds = b" ".join(_KIND.findall(content)).decode("ascii", "replace").split()
        if "noteref" in kinds or not _NO_TEXT.isdisjoint(kinds):
            return None
    try:
        return plain_text(content[begin.end() : content.rfind(b"</body>")])
    except UnicodeDecodeError:
        return None


def _meta(package: Any) -> dict[str, Any]:
    """What Dublin Core says of the book."""
    found: dict[str, list[str]] = {}
    for element in package.iter("{http://purl.org/dc/elements/1.1/}*", "{http://purl.org/dc/elements/1.0/}*"):
        value = " ".join("".join(element.itertext()).split())
        if value:
            found.setdefault(etree.QName(element).localname.lower(), []).append(value[:1000])
    meta: dict[str, Any] = {
        name: found[name][0] for name in ("title", "language", "publisher", "date") if name in found
    }
    if "creator" in found:
        meta["author"] = "; ".join(found["creator"][:20])
    if "identifier" in found:
        meta["identifier"] = found["identifier"][0]
    if "subject" in found:
        meta["subjects"] = found["subject"][:50]
    if "rights" in found:
        meta["licence"] = licence_id(found["rights"][0]) or found["rights"][0]
    return meta


@functools.cache
def _xml_parser() -> Any:
    # Making one costs as much as reading a chapter.
    return etree.XMLParser(
        resolve_entities=False, load_dtd=False, no_network=True, huge_tree=False, remove_comments=True, remove_pis=True
    )
