"""Transfer encodings of mail, as declared and as they really are."""

from __future__ import annotations

import binascii
import re

_NOT_BASE64 = re.compile(rb"[^A-Za-z0-9+/=]+")
_SOFT_BREAK = re.compile(r"(?<=[^=\s\n])=\n|=20\n")
_ESCAPE = re.compile(r"=([0-9A-F]{2})")
_UUENCODED = re.compile(r"(?m)^begin [0-7]{3,4} [^\n]{1,200}\n(?:[!-`][ -`]{1,61}\n)+`?\n?end\n?")


def transfer_decoded(content: bytes, encoding: str) -> bytes:
    """Quoted-printable and base64 taken off; damage costs what is damaged and no more."""
    lowered = encoding.strip().lower()
    if lowered.startswith("quoted-printable"):
        return binascii.a2b_qp(content)
    if lowered.startswith("base64"):
        cleaned = _NOT_BASE64.sub(b"", content).partition(b"=")[0]
        return binascii.a2b_base64(cleaned[: len(cleaned) - (len(cleaned) % 4 == 1)] + b"===")
    return content


def repaired(text: str) -> str:
    """Undo quoted-printable that no header declares: conversions of old archives lost the header, not the encoding.

    Only where it is plain to see (several soft line breaks), so that a formula with an equals sign stays.

    >>> repaired("We are going to=20\\nmeet on Monday the =\\nfirst, and pay =A35=2E\\n")
    'We are going to \\nmeet on Monday the first, and pay £5.\\n'
    """
    if "=\n" not in text and "=20\n" not in text:
        return text
    if len(_SOFT_BREAK.findall(text)) + text.count(" =\n") < 2:
        return text
    joined = text.replace("=20\n", " \n").replace("=\n", "")
    return _ESCAPE.sub(lambda found: bytes.fromhex(found.group(1)).decode("cp1252", "replace"), joined)


def without_uuencoded(text: str) -> str:
    """The text without files that were put into it as uuencoded lines."""
    return _UUENCODED.sub("", text) if "\nbegin " in text or text.startswith("begin ") else text
