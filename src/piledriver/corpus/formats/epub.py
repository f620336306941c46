"""EPUB books: the text of the chapters in spine order, and the Dublin Core metadata of the package."""

from __future__ import annotations

import io
import posixpath
import re
import struct
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from lxml import etree

from piledriver.corpus.document import RejectedError
from piledriver.corpus.formats.html.convert import fragment_to_text, remove_element, remove_unseen
from piledriver.corpus.formats.html.fast.convert import scan_to_text
from piledriver.corpus.formats.html.page import decode_page
from piledriver.corpus.formats.html.render import render
from piledriver.corpus.formats.xml.entities import with_character_entities
from piledriver.corpus.formats.xml.parse import XmlError, parse_xml, strip_namespaces
from piledriver.corpus.raw.limits import LimitError
from piledriver.corpus.text.creative_commons import licence_id
from piledriver.corpus.text.data_table import word_set
from piledriver.corpus.text.normalise import NotTextError

MAX_MEMBER_BYTES = 1 << 25
MAX_BOOK_BYTES = 1 << 27
MAX_CHAPTERS = 20_000
# The header before each file of the archive: its magic, the length of its name and of its extra field.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_FONT_OBFUSCATION = (b"http://www.idpf.org/2008/embedding", b"http://ns.adobe.com/pdf/enc#RC")
_XMLNS = re.compile(rb"\sxmlns\s*=\s*(?:\"[^\"]{0,300}\"|'[^']{0,300}')")
_UTF8 = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml(?![^>]*encoding=[\"'](?!utf-8))|<(?:!DOCTYPE|html))", re.IGNORECASE)
# Empty anchors, which mark the beginning of a printed page.
_EMPTY_ANCHORS = re.compile(rb"(?:\s*<a\s[^<>]*(?:/>|></a>))*\s*")
_TYPE = re.compile(rb":type\s*=\s*[\"']([^\"'<>]*)")
_DOCTYPE = re.compile(rb"<!DOCTYPE[^>\[]{0,1000}>", re.IGNORECASE)
_EPUB_TYPE = "{http://www.idpf.org/2007/ops}type"
# Types of the parts of a book that are not its text.
_NO_TEXT = word_set("toc landmarks page-list loi lot colophon imprint copyright-page cover pagebreak halftitlepage")
_CHAPTER_KINDS = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml", "text/x-oeb1-document")


class EpubError(RejectedError):
    """An EPUB that cannot be read."""


@dataclass(frozen=True)
class Book:
    """The texts of the chapters in reading order, and title, author, language, licence and the like."""

    chapters: list[str]
    meta: dict[str, Any]


def read_epub(content: bytes, *, compiled: bool = False) -> Book:
    """Return the book of an EPUB file; raise `EpubError` where it cannot be read.

    `compiled` reads plain chapters with the scanner of `formats/html/fast`.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return _read_book(_Members(archive, content), compiled)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise EpubError(str(error), "damaged epub") from error
    except XmlError as error:
        raise EpubError(str(error), "invalid xml") from error


def _read_book(members: _Members, compiled: bool) -> Book:
    if members.find(_ENCRYPTION) and _is_encrypted(members.read(_ENCRYPTION)):
        raise EpubError("digital rights management", "encrypted")
    package_path = _package_path(members)
    if package_path is None:
        raise EpubError("no .opf file", "no package")
    package = parse_xml(with_character_entities(members.read(package_path)))
    paths = [path for path in _spine(package, package_path)[:MAX_CHAPTERS] if members.find(path)]
    return Book([chapter_text(members.read(path), compiled=compiled) for path in paths], _meta(package))


class _Members:
    """Read files of the archive by the names that the package uses, up to `MAX_BOOK_BYTES` in all."""

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
            raise LimitError(f"{path} is larger than {limit} bytes")
        self._left -= len(content)
        return content

    def _inflated(self, name: str, limit: int) -> bytes | None:
        """Return an intact deflated member in half the time `zipfile` takes; `None` leaves any other to `zipfile`."""
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


def _is_encrypted(encryption: bytes) -> bool:
    methods = re.findall(rb"EncryptionMethod[^>]{0,200}Algorithm\s*=\s*[\"']([^\"']{1,200})", encryption)
    return any(method not in _FONT_OBFUSCATION for method in methods)


def _package_path(members: _Members) -> str | None:
    if members.find(_CONTAINER):
        with suppress(XmlError):
            for rootfile in parse_xml(members.read(_CONTAINER)).iter("{*}rootfile"):
                path = unquote(rootfile.get("full-path") or "")
                if members.find(path):
                    return path
    return members.ending(".opf")


def _spine(package: Any, package_path: str) -> list[str]:
    """Return the paths of the chapters; where the spine is empty, all documents in the order of the manifest."""
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


def chapter_text(content: bytes, *, compiled: bool = False) -> str:
    """Return the text of a chapter, parsed as XML (where empty elements close themselves) or, failing that, as HTML."""
    text = _scanned_chapter(content) if compiled else None
    if text is not None:
        return text
    try:
        root = parse_xml(_DOCTYPE.sub(b"", _XMLNS.sub(b"", with_character_entities(content))))
    except (XmlError, ValueError):
        try:
            return fragment_to_text(decode_page(content))
        except NotTextError:
            return ""
    strip_namespaces(root)
    for element in root.xpath("//*[@*[local-name()='type']]"):
        kinds = (element.get(_EPUB_TYPE) or "").split()
        if not _NO_TEXT.isdisjoint(kinds):
            if element.tag in ("body", "html"):
                return ""
            remove_element(element)
        elif "noteref" in kinds and not len(element) and (element.text or "").strip().isdigit():
            # Brackets keep the number of a note apart from the word before it.
            element.text = f"[{element.text.strip()}]"
    for switch in root.iter("switch"):
        # The same content several times: formulas as MathML, which is read here, or a fallback.
        readable = switch.find("case//math") is not None
        for element in switch.findall("default" if readable else "case"):
            remove_element(element)
    remove_unseen(root, content)
    body = root.find("body")
    return render(root if body is None else body)


def _scanned_chapter(content: bytes) -> str | None:
    """Return the text of a chapter that is plain enough for the compiled scanner, else `None`."""
    start = content.find(b">", content.find(b"<body")) + 1
    begin = _EMPTY_ANCHORS.match(content, start)
    if not start or begin is None or content[begin.end() : begin.end() + 1] != b"<" or not _UTF8.match(content):
        return None
    if b":type" in content:
        kinds = b" ".join(_TYPE.findall(content)).decode("ascii", "replace").split()
        if "noteref" in kinds or not _NO_TEXT.isdisjoint(kinds):
            return None
    try:
        return scan_to_text(content[begin.end() : content.rfind(b"</body>")])
    except UnicodeDecodeError:
        return None


def _meta(package: Any) -> dict[str, Any]:
    """Return the Dublin Core fields of the package as document meta."""
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
        # Most rights are a line of copyright, which is no licence.
        meta["rights"] = found["rights"][0]
        meta["licence"] = licence_id(found["rights"][0]) or "unknown"
    return meta
