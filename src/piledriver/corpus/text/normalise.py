"""Decode bytes and normalise text: encodings, Unicode form, control characters, mojibake, blank lines."""

from __future__ import annotations

import re
import unicodedata

from piledriver.corpus.document import RejectedError

_BINARY_HEAD_BYTES = 8192
_BINARY_BYTES = bytes((*range(7), *range(0x0E, 0x1B), *range(0x1C, 0x20), 0x7F))
_SIGNATURES = (
    *(b"%PDF-", b"PK\x03\x04", b"\x1f\x8b", b"\xfd7zXZ", b"7z\xbc\xaf", b"Rar!\x1a", b"\x28\xb5\x2f\xfd", b"BZh91AY"),
    *(b"\x89PNG", b"GIF8", b"\xff\xd8\xff", b"OggS", b"ID3\x03", b"ID3\x04", b"\x7fELF", b"\xd0\xcf\x11\xe0"),
)

# Characters that no text needs: C0 controls but tab and newline, soft hyphen, byte order mark, non-characters. The C1
# controls are separate, because mojibake consists of them until it is repaired.
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f\xad\ufeff\ufffe\uffff]")
_C1_CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")
# Bytes that none of the patterns here match. The few bytes that remain of most text tell which patterns to try.
_HARMLESS = bytes((9, 10, *range(32, 127)))
_C1_BYTES = re.compile(rb"\xc2[\x80-\x9f]")
# Everything below U+0300, Greek, Cyrillic, most signs, and Chinese, Japanese and Korean are in form C: this search is
# much faster than `unicodedata.is_normalized`.
_MAY_NOT_BE_NFC = re.compile(
    rb"[\xcc\xcd\xd2-\xe1\xef-\xff]|\xce\x87|\xe2(?:\x80[\x80\x81]|\x84[\xa6\xaa\xab]|\x8c[\xa9\xaa]|\xab\x9c"
    rb"|\x83|[\xb3\xb5\xb7])|\xe3(?:\x80[\xaa-\xaf]|\x82[\x99\x9a])|\xea[\x80-\xaf]|\xed[\x9e-\xbf]"
)
_MOJIBAKE_BYTES = re.compile(rb"\xc3[\x82-\xb4][\xc2\xc5\xc6\xcb\xe2]")
_LINE_BREAKS = re.compile("\r\n?|[\x0b\x0c\u2028\u2029]")
_LINE_BREAK_BYTES = (b"\r", b"\x0b", b"\x0c", b"\xe2\x80\xa8", b"\xe2\x80\xa9")
_SPACES = " \t\xa0"
_BLANK_LINES = re.compile("\n{3,}")
_SURROGATES = re.compile("[\ud800-\udfff]")
_HIGH_BYTES = bytes(range(128, 256))
# Other scripts decoded as Windows-1252: symbols inside words, long runs of accented letters.
_NOT_WESTERN = re.compile("[a-z][¡-§©¬®-´¶¸¹»-¿×÷][a-z]|[\xc0-\xff]{4}|\ufffd")
# UTF-8 decoded as a one-byte encoding: the character of a lead byte, then that of a continuation byte.
_MOJIBAKE_HINT = re.compile("[\xc2-\xf4][\x80-\xbf\u0152-\u0192\u02c6\u02dc\u2013-\u203a\u20ac\u2122]")


class NotTextError(RejectedError):
    """Binary content where text is expected."""

    reason = "not text"


def is_binary(content: bytes) -> bool:
    """Return whether bytes are not text in UTF-8 or a one-byte encoding, by their first bytes.

    Binary formats are recognised by their signature, other data by NUL bytes and many control characters. Any byte
    string can be decoded in a one-byte encoding, so this test precedes every guess of one.

    >>> is_binary(b"%PDF-1.4 ..."), is_binary(b"a\\x00b"), is_binary(b"na\\xefve\\r\\n\\tcaf\\xe9")
    (True, True, False)
    """
    head = content[:_BINARY_HEAD_BYTES]
    controls = len(head) - len(head.translate(None, _BINARY_BYTES))
    return head.startswith(_SIGNATURES) or b"\x00" in head or controls * 20 > len(head)


def decode_text(content: bytes, declared: str | None = None) -> str:
    """Decode by byte order mark, UTF-8, the declared encoding, a detector, and Windows-1252 as the last resort.

    Raise `NotTextError` where the content is binary.

    >>> decode_text("naïve".encode("latin-1"))
    'naïve'
    """
    if name := _wide_encoding(content):
        return content.decode(name, "replace").removeprefix("\ufeff")
    if is_binary(content):
        raise NotTextError("binary content")
    if content.startswith(b"\xef\xbb\xbf"):
        return content[3:].decode("utf-8", "replace")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        # A few broken bytes in valid UTF-8: no other encoding looks like that.
        nearly = content.decode("utf-8", "replace")
        if 50 * nearly.count("\ufffd") < len(content) - len(nearly):
            return nearly
    for guess in (declared, _detected(content)):
        if guess is None:
            continue
        try:
            return content.decode(guess)
        except (UnicodeDecodeError, LookupError):
            continue
    return content.decode("cp1252", "replace")


def _wide_encoding(content: bytes) -> str | None:
    """Return UTF-16 or UTF-32 by the byte order mark, or UTF-16 by the NUL in every second byte of Latin text."""
    if content.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        return "utf-32"
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    head = content[:_BINARY_HEAD_BYTES]
    for name, first in (("utf-16-le", 1), ("utf-16-be", 0)):
        zeros, others = head[first::2].count(0), head[1 - first :: 2].count(0)
        if zeros >= 8 and zeros * 10 > 4 * len(head) and not others:
            return name
    return None


def _detected(content: bytes) -> str | None:
    # More bytes do not change the result of the detectors.
    sample = content[: 1 << 16]
    high_bytes = len(sample) - len(sample.translate(None, _HIGH_BYTES))
    if high_bytes >= 0.04 * len(sample) and len(sample) >= 256:
        # Much of it is not ASCII: perhaps a script of its own, and enough of it for the thorough detector.
        import charset_normalizer

        match = charset_normalizer.from_bytes(sample).best()
        return match.encoding if match is not None else None
    if not _NOT_WESTERN.search(sample.decode("cp1252", "replace")):
        return "cp1252"
    from resiliparse.parse.encoding import detect_encoding

    fast: str | None = detect_encoding(sample)
    return fast


def normalise(text: str) -> str:
    """Return prose in one form: NFC, `\\n` line breaks, no control characters, mojibake repaired, single blank lines.

    Idempotent.

    >>> normalise("cafe\\u0301\\r\\n\\r\\n\\r\\n\\r\\ndoes\\x00nâ€™t ")
    'café\\n\\ndoesn’t'
    """
    odd = _odd_bytes(text)
    if odd:
        # Searching for each mark is much faster than a pattern.
        if any(mark in odd for mark in _LINE_BREAK_BYTES):
            text = _LINE_BREAKS.sub("\n", text)
            odd = _odd_bytes(text)
        text = _unicode_form(text, odd)
    # Tabs and wide spaces are rare, and one character is found much sooner than two.
    if any(space in text and f"{space}\n" in text for space in _SPACES) or text[-1:] in _SPACES:
        # Not by a pattern: `[ ]+$` takes the square of the length of a run of spaces that ends in something else.
        text = "\n".join(line.rstrip(_SPACES) for line in text.split("\n"))
    return (_BLANK_LINES.sub("\n\n", text) if "\n\n\n" in text else text).strip("\n")


def normalise_code(text: str) -> str:
    """Return code unchanged, except for surrogates and NUL, which no text may hold, and `\\n` line breaks."""
    return _SURROGATES.sub("?", text.replace("\r\n", "\n").replace("\x00", ""))


def _unicode_form(text: str, odd: bytes) -> str:
    # A step can enable another (a composed letter can look like mojibake): repeat until nothing changes.
    while odd:
        before = text
        if b"\xed" in odd:
            text = _SURROGATES.sub("?", text)
        if _MAY_NOT_BE_NFC.search(odd) and not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
            odd = _odd_bytes(text)
        if _may_have_controls(odd):
            text = _CONTROLS.sub("", text)
            odd = _odd_bytes(text)
        # The odd bytes are adjacent here but perhaps not in the text: check before the slow pattern.
        mended = (
            _MOJIBAKE_BYTES.search(odd) is not None
            and _MOJIBAKE_BYTES.search(text.encode("utf-8", "surrogatepass")) is not None
            and _MOJIBAKE_HINT.search(text) is not None
        )
        if mended:
            text = _mended(text)
        if mended or _C1_BYTES.search(odd):
            text = _C1_CONTROLS.sub("", text).replace("\x85", "\n")
        if text == before:
            break
        odd = _odd_bytes(text)
    return text


def _may_have_controls(odd: bytes) -> bool:
    marks = (b"\xc2\xad", b"\xef\xbb\xbf", b"\xef\xbf")
    return any(mark in odd for mark in marks) or bool(odd.translate(None, _HIGH_BYTES))


def _odd_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass").translate(None, _HARMLESS)


def _mended(text: str) -> str:
    import ftfy

    # Line by line: one bad quotation must not change the whole book, and ftfy's time grows with the length.
    return "\n".join(ftfy.fix_encoding(line) if _MOJIBAKE_HINT.search(line) else line for line in text.split("\n"))
