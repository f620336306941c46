"""Decode a web page, and read its title, language and licence."""

from __future__ import annotations

import codecs
import re
from typing import Any

from piledriver.corpus.text.creative_commons import licence_id
from piledriver.corpus.text.normalise import decode_text

_META_CHARSET = re.compile(rb"<meta[^>]{0,300}?charset\s{0,9}=\s{0,9}[\"']?\s{0,9}([\w.:-]{2,40})", re.IGNORECASE)
_XML_ENCODING = re.compile(rb"^\s{0,99}<\?xml[^>]{0,200}?encoding\s{0,9}=\s{0,9}[\"']([\w.:-]{2,40})")
_HEAD_CHARACTERS = 200_000
_TITLE = re.compile(r"<title[^>]{0,300}>([^<]{1,2000})", re.IGNORECASE)
_LICENCE_LINK = re.compile(
    r"<(?:a|link)\b[^<>]{0,2000}\brel\s{0,9}=\s{0,9}[\"'][^\"']{0,100}\blicense\b[^<>]{0,2000}>", re.IGNORECASE
)
_HTML_LANGUAGE = re.compile(r"<html\b[^<>]{0,1000}?\blang\s{0,9}=\s{0,9}[\"']?([a-zA-Z-]{2,15})", re.IGNORECASE)
# Browsers decode Latin-1 as Windows-1252.
_BROWSER_NAMES = dict.fromkeys(("iso-8859-1", "latin-1", "latin1", "ascii", "us-ascii"), "cp1252")


def decode_page(content: bytes, charset: str | None = None) -> str:
    """Decode a page by the charset of the server, else that of the page, else a detector.

    >>> decode_page("<meta charset=windows-1251><p>мир".encode("cp1251"))
    '<meta charset=windows-1251><p>мир'
    """
    head = content[:4096]
    named = _META_CHARSET.search(head) or _XML_ENCODING.search(head)
    for name in (charset, named[1].decode("ascii") if named else None):
        known = _known(name)
        if known is not None:
            return decode_text(content, known)
    return decode_text(content)


def _known(name: str | None) -> str | None:
    if not name:
        return None
    lowered = name.strip().lower()
    lowered = _BROWSER_NAMES.get(lowered, lowered)
    try:
        found = codecs.lookup(lowered).name
    except (LookupError, ValueError):
        return None
    # UTF-8 is tried first in any case; a page that is not UTF-8 is mislabelled and left to the detector.
    return None if found.startswith("utf-8") else lowered


def page_meta(html: str) -> dict[str, Any]:
    """Return title, declared language, and the licence that the page links to as its own."""
    import html as entities

    meta: dict[str, Any] = {}
    if title := _TITLE.search(html, 0, _HEAD_CHARACTERS):
        meta["title"] = " ".join(entities.unescape(title[1]).split())
    if language := _HTML_LANGUAGE.search(html, 0, _HEAD_CHARACTERS):
        meta["html_language"] = language[1].lower()
    if _may_name_its_licence(html):
        found = next(filter(None, (licence_id(link[0]) for link in _LICENCE_LINK.finditer(html))), None)
        if found:
            meta["licence"] = found
    return meta


def _may_name_its_licence(html: str) -> bool:
    """Return whether "license" follows a "rel" anywhere: the exact pattern is slow on pages of links."""
    at = html.find("license")
    while at >= 0:
        if "rel" in html[max(0, at - 130) : at].lower():
            return True
        at = html.find("license", at + 7)
    return False
