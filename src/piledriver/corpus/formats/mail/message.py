"""Parse a raw message (RFC 5322 and MIME) to its headers and its text.

The standard library's parser builds an object for every part. Nearly all mail is one part of plain text, so here a
message is split at the first blank line, and only one of several parts is split further.
"""

from __future__ import annotations

import re
from datetime import date, time
from typing import Any

import msgspec

from piledriver.corpus.formats.html.convert import fragment_to_text
from piledriver.corpus.formats.mail.transfer import (
    repaired,
    transfer_decoded,
    without_armour,
    without_scrubbed,
    without_uuencoded,
)
from piledriver.corpus.text.normalise import NotTextError, decode_text

MAX_DEPTH = 12
MAX_PARTS = 2000

_FOLD = re.compile(r"\n[ \t]+")
_HEADER = re.compile(r"^([!-9;-~]{1,76})[ \t]*:(.*)$", re.MULTILINE)
_DATE = re.compile(
    r"(?:[A-Z][a-z]{2}, {1,2})?(\d{1,2}) ([A-Z][a-z]{2}) (\d{4}) (\d\d:\d\d:\d\d) ([+-]\d\d)(\d\d)(?: \([A-Z]{1,5}\))?"
)
_MONTHS = {name: number for number, name in enumerate(str.split("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec"), 1)}
_PARAMETER = re.compile(r""";\s*([\w-]{1,40})(?:\*\d*\*?)?\s*=\s*(?:"([^"]{0,400})"|([^\s;"]{1,400}))""")
_BLANK_START = re.compile(r"\A(?:[ \t\xa0]*\n)+")
_GUESSED_BOUNDARY = re.compile(rb"(?:\A|\n)--([!-~]{1,70}?)[ \t]*\n(?=Content-[A-Za-z-]{1,40}:)")
_HTML = re.compile(r"\s{0,200}(?:<!doctype html|<html|<head|<body)", re.IGNORECASE)


class MimePart(msgspec.Struct, frozen=True, gc=False):
    """Headers (lower-case names, first one wins) and the bytes after them."""

    headers: dict[str, str]
    content: bytes


class UnreadableError(ValueError):
    """Not a message: it does not begin with headers."""


def split_headers(raw: bytes) -> MimePart:
    """Split a message or a MIME part at its first blank line."""
    if b"\r" in raw:
        raw = raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if raw.startswith(b"\n"):
        return MimePart({}, raw[1:])
    head, _, content = raw.partition(b"\n\n")
    try:
        text, encoding = head.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        text, encoding = head.decode("latin-1"), "latin-1"
    if "\n " in text or "\n\t" in text:
        text = _FOLD.sub(" ", text)
    headers: dict[str, str] = {}
    lines = text.split("\n")
    pairs = _HEADER.findall(text)
    if len(pairs) == len(lines):
        # Every line is a header, as in nearly all messages. The first of a name counts.
        for name, value in reversed(pairs):
            headers[name.lower()] = _header_text(value.strip()) if "=?" in value else value.strip()
        return MimePart(headers, content)
    for number, line in enumerate(lines):
        name, colon, value = line.partition(":")
        name = name.rstrip()
        if not colon or not name or " " in name or len(name) > 76 or not name.isascii():
            if number == 0 and line.startswith(("From ", ">From ")):
                continue
            if not headers:
                raise UnreadableError("no headers")
            if not colon and " " in line.strip():
                # Headers that end without a blank line: the body follows.
                return MimePart(headers, raw[max(0, raw.find(line.encode(encoding))) :])
            continue
        name = name.lower()
        if name not in headers:
            headers[name] = _header_text(value.strip()) if "=?" in value else value.strip()
    return MimePart(headers, content)


def body_text(part: MimePart) -> str:
    """Return the text of a message: its plain text, or its HTML where it has no other; without attachments."""
    texts = _texts(part)
    if len(texts) == 1:
        return _BLANK_START.sub("", texts[0], count=1) if texts[0] and not texts[0].isspace() else ""
    kept: list[str] = []
    seen: set[str] = set()
    for text in texts:
        # The same text as plain text and as HTML, but not declared as alternatives.
        words = " ".join(text.split())
        if words and words not in seen:
            seen.add(words)
            kept.append(_BLANK_START.sub("", text, count=1))
    return "\n\n".join(kept)


def forwarded_heading(headers: dict[str, str]) -> str:
    """Return the lines that introduce a message inside a message."""
    names = (("from", "From"), ("date", "Date"), ("to", "To"), ("subject", "Subject"))
    return "\n".join(f"{shown}: {headers[name]}" for name, shown in names if headers.get(name))


def _texts(message: MimePart) -> list[str]:
    found: list[str] = []
    seen = 0
    # A stack instead of recursion: parts may be nested to any depth.
    stack: list[tuple[MimePart, int, str]] = [(message, 0, "text/plain")]
    while stack:
        part, depth, default = stack.pop()
        seen += 1
        kind, parameters = content_type(part.headers.get("content-type", ""), default)
        if depth and part.headers.get("content-disposition", "").lower().startswith("attachment"):
            continue
        if kind.startswith("multipart/"):
            if depth >= MAX_DEPTH or seen > MAX_PARTS:
                continue
            parts = _parts(part.content, parameters.get("boundary", ""))
            if not parts and (guess := _GUESSED_BOUNDARY.search(part.content)) is not None:
                # The header names another boundary than the one that is used.
                parts = _parts(part.content, guess.group(1).decode("latin-1"))
            if not parts and not depth:
                found.append(_plain(part.content, parameters, part.headers))
            if kind == "multipart/alternative":
                parts = _best(parts)
            inner = "message/rfc822" if kind == "multipart/digest" else "text/plain"
            stack.extend((one, depth + 1, inner) for one in reversed(parts))
        elif kind == "message/rfc822":
            if depth >= MAX_DEPTH:
                continue
            try:
                inside = split_headers(
                    transfer_decoded(part.content, part.headers.get("content-transfer-encoding", ""))
                )
            except UnreadableError:
                continue
            found.append(forwarded_heading(inside.headers))
            stack.append((inside, depth + 1, "text/plain"))
        elif kind == "text/html" or kind in ("text/plain", "text") or (kind.startswith("text/") and not depth):
            try:
                found.append((_html if kind == "text/html" else _plain)(part.content, parameters, part.headers))
            except NotTextError:
                # A file that is declared as text; of a message of one part it is the whole body.
                if not depth:
                    raise
    return found


def _html(content: bytes, parameters: dict[str, str], headers: dict[str, str]) -> str:
    content = transfer_decoded(content, headers.get("content-transfer-encoding", ""))
    return fragment_to_text(decode_text(content, parameters.get("charset"))).strip()


def _plain(content: bytes, parameters: dict[str, str], headers: dict[str, str]) -> str:
    encoding = headers.get("content-transfer-encoding", "")
    text = decode_text(transfer_decoded(content, encoding), parameters.get("charset"))
    if not encoding.lower().startswith(("quoted", "base64")):
        text = repaired(text)
    if parameters.get("format", "").lower() == "flowed":
        text = _unflowed(text, parameters.get("delsp", "").lower() == "yes")
    if _HTML.match(text):
        text = fragment_to_text(text)
    return without_scrubbed(without_armour(without_uuencoded(text))).rstrip().lstrip("\n")


def _best(parts: list[MimePart]) -> list[MimePart]:
    """Return the plain one of several alternatives, else the last, which is the richest by convention."""
    for wanted in ("text/plain", "text/html"):
        for part in parts:
            kind = content_type(part.headers.get("content-type", ""), "text/plain")[0]
            if kind == wanted and part.content.strip():
                return [part]
    return parts[-1:]


def _parts(content: bytes, boundary: str) -> list[MimePart]:
    mark = b"\n--" + boundary.encode("latin-1", "replace")
    if not boundary:
        return []
    parts = []
    for raw in (b"\n" + content).split(mark)[1 : MAX_PARTS + 1]:
        if raw.startswith(b"--"):
            break
        end = raw.find(b"\n")
        if end < 0:
            continue
        try:
            parts.append(split_headers(raw[end + 1 :]))
        except UnreadableError:
            parts.append(MimePart({}, raw[end + 1 :]))
    return parts


def content_type(value: str, default: str) -> tuple[str, dict[str, str]]:
    """Return the kind and the parameters of a header such as `text/plain; charset=utf-8`.

    >>> content_type('Text/HTML; charset="UTF-8"', "text/plain")
    ('text/html', {'charset': 'UTF-8'})
    """
    if not value:
        return default, {}
    kind, _, rest = value.partition(";")
    kind = kind.strip().lower()
    parameters = (
        {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(";" + rest)} if rest else {}
    )
    return (kind if "/" in kind or kind == "text" else default), parameters


def _header_text(text: str) -> str:
    """Decode a header such as `=?utf-8?q?caf=C3=A9?=`."""
    from email.errors import HeaderParseError
    from email.header import decode_header

    try:
        parts = decode_header(text)
        return "".join(part if isinstance(part, str) else decode_text(part, charset) for part, charset in parts)
    except (HeaderParseError, ValueError):
        return text


def _unflowed(text: str, delete_space: bool) -> str:
    lines: list[str] = []
    open_line = False
    for line in text.split("\n"):
        quoted = line.startswith(">")
        if line.startswith(" ") and not quoted:
            line = line[1:]
        if open_line and not quoted and line != "-- " and lines:
            lines[-1] += line
        else:
            lines.append(line)
        open_line = line.endswith(" ") and line != "-- " and not quoted
        if open_line and delete_space:
            lines[-1] = lines[-1][:-1]
    return "\n".join(lines)


def meta_of(headers: dict[str, str]) -> dict[str, Any]:
    """Return sender, receivers, date, subject and other headers as meta."""
    meta: dict[str, Any] = {}
    for name, key in (
        ("message-id", "message_id"), ("from", "from"), ("to", "to"), ("cc", "cc"), ("subject", "subject"),
        ("in-reply-to", "in_reply_to"), ("x-folder", "folder"), ("x-origin", "mailbox"), ("list-id", "list"),
    ):  # fmt: skip
        if value := headers.get(name):
            meta[key] = " ".join(value.split()) if "  " in value or "\t" in value else value
    if sent := headers.get("date"):
        meta["date"] = iso_date(sent)
    return meta


def iso_date(text: str) -> str:
    """Return the date of a message as ISO 8601; one that cannot be parsed unchanged.

    >>> iso_date("Mon, 14 May 2001 16:39:00 -0700 (PDT)"), iso_date("yesterday")
    ('2001-05-14T16:39:00-07:00', 'yesterday')
    """
    try:
        if (found := _DATE.fullmatch(text)) and (month := _MONTHS.get(found[2])):
            return f"{date(int(found[3]), month, int(found[1]))}T{time.fromisoformat(found[4])}{found[5]}:{found[6]}"
        from email.utils import parsedate_to_datetime

        return parsedate_to_datetime(text).isoformat()
    except (ValueError, TypeError, IndexError, OverflowError):
        return text
