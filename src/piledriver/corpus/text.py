"""Bytes to text, and text to clean text: encodings, Unicode form, control characters, mojibake, blank lines."""

from __future__ import annotations

import re
import unicodedata

# Characters that no text needs: C0 and C1 controls but tab and newline, soft hyphen, byte order mark, non-characters.
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\xad\ufeff\ufffe\uffff]")
_ASCII_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f]")
_LINE_BREAKS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
_TRAILING_SPACE = re.compile("[ \t\xa0]+$", re.MULTILINE)
_BLANK_LINES = re.compile("\n{3,}")
_SURROGATES = re.compile("[\ud800-\udfff]")
# What UTF-8 read as a one-byte encoding looks like: a lead byte's character, then one of a continuation byte.
_MOJIBAKE_HINT = re.compile("[\xc2-\xf4][\x80-\xbf\u0152-\u0192\u02c6\u02dc\u2013-\u203a\u20ac\u2122]")


def decode(content: bytes, declared: str | None = None) -> str:
    """Bytes to text: byte order mark, UTF-8, the declared encoding, a detector, and Windows-1252 as the last resort.

    >>> decode("naïve".encode("latin-1"))
    'naïve'
    """
    for mark, name in (
        (b"\xef\xbb\xbf", "utf-8"),
        (b"\xff\xfe\x00\x00", "utf-32"),
        (b"\xff\xfe", "utf-16"),
        (b"\xfe\xff", "utf-16"),
    ):
        if content.startswith(mark):
            return content.decode(name, "replace").removeprefix("\ufeff")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        pass
    for guess in (declared, _detected(content)):
        if guess is None:
            continue
        try:
            return content.decode(guess)
        except (UnicodeDecodeError, LookupError):
            continue
    return content.decode("cp1252", "replace")


def _detected(content: bytes) -> str | None:
    from resiliparse.parse.encoding import detect_encoding

    # The detector needs no more than this to make up its mind.
    name: str | None = detect_encoding(content[: 1 << 17])
    return name


def normalise(text: str) -> str:
    """Prose in one form: NFC, `\\n` line breaks, no control characters, mojibake mended, at most one blank line in a
    row.

    Idempotent: normalising twice changes nothing more.

    >>> normalise("cafe\\u0301\\r\\n\\r\\n\\r\\n\\r\\ndoes\\x00nâ€™t ")
    'café\\n\\ndoesn’t'
    """
    text = _LINE_BREAKS.sub("\n", text)
    if text.isascii():
        text = _ASCII_CONTROLS.sub("", text)
    else:
        text = _SURROGATES.sub("\ufffd", text)
        if _MOJIBAKE_HINT.search(text):
            text = _mended(text)
        text = _CONTROLS.sub("", text)
        if not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
    text = _TRAILING_SPACE.sub("", text)
    return _BLANK_LINES.sub("\n\n", text).strip("\n")


def normalise_code(text: str) -> str:
    """Code as it is, but for what no text may hold: surrogates and NUL; line breaks as `\\n`."""
    return _SURROGATES.sub("\ufffd", text.replace("\r\n", "\n").replace("\x00", ""))


def _mended(text: str) -> str:
    import ftfy

    # Line by line: one bad quotation must not decide for the whole book, and ftfy's cost grows with the length.
    return "\n".join(ftfy.fix_encoding(line) if _MOJIBAKE_HINT.search(line) else line for line in text.split("\n"))
