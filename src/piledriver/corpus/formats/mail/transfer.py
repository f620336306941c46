"""Decode the transfer encodings of mail, declared or not, and remove encoded files and signatures."""

from __future__ import annotations

import binascii
import re

_NOT_BASE64 = re.compile(rb"[^A-Za-z0-9+/=]+")
_SOFT_BREAK = re.compile(r"(?<=[^=\s\n])=\n|=20\n")
_SIGNED = re.compile(r"(?m)^-----BEGIN PGP SIGNED MESSAGE-----[ \t]*\n(?:Hash: [^\n]{1,80}\n)*(?:[ \t]*\n)?")
_SIGNATURE = "-----BEGIN PGP SIGNATURE-----"
_END_OF_SIGNATURE = "-----END PGP SIGNATURE-----"
_DASHED = re.compile(r"(?m)^- (?=-)")
_SCRUBBED = re.compile(
    r"(?m)^-{10,20} next part -{10,20}\n(?:A|An) [^\n]{1,60}attachment was scrubbed\.\.\.\n"
    r"(?:(?:Name|Type|Size|Desc|URL|Url) ?:[^\n]{0,500}\n?)*"
)
_ESCAPE = re.compile(r"=([0-9A-F]{2})")
_UUENCODED = re.compile(r"(?m)^begin [0-7]{3,4} [^\n]{1,200}\n(?:[!-`][ -`]{1,61}\n)+`?\n?end\n?")


def transfer_decoded(content: bytes, encoding: str) -> bytes:
    """Return the content without quoted-printable or base64; damaged bytes are skipped."""
    lowered = encoding.strip().lower()
    if lowered.startswith("quoted-printable"):
        return binascii.a2b_qp(content)
    if lowered.startswith("base64"):
        cleaned = _NOT_BASE64.sub(b"", content).partition(b"=")[0]
        return binascii.a2b_base64(cleaned[: len(cleaned) - (len(cleaned) % 4 == 1)] + b"===")
    return content


def repaired(text: str) -> str:
    """Decode quoted-printable that no header declares: conversions of old archives lost the header, not the encoding.

    Only text with several soft line breaks is decoded, so that a formula with an equals sign stays.

    >>> repaired("We are going to=20\\nmeet on Monday the =\\nfirst, and pay =A35=2E\\n")
    'We are going to \\nmeet on Monday the first, and pay £5.\\n'
    """
    if "=\n" not in text and "=20\n" not in text:
        return text
    if len(_SOFT_BREAK.findall(text)) + text.count(" =\n") < 2:
        return text
    joined = text.replace("=20\n", " \n").replace("=\n", "")
    return _ESCAPE.sub(lambda found: bytes.fromhex(found.group(1)).decode("cp1252", "replace"), joined)


def without_armour(text: str) -> str:
    """Return a signed text without the PGP frame and the signature.

    >>> framed = "-----BEGIN PGP SIGNED MESSAGE-----\\nHash: SHA1\\n\\nHi.\\n- -- \\nB\\n" + _SIGNATURE + "\\niEY=\\n"
    >>> without_armour(framed)
    'Hi.\\n-- \\nB\\n'
    """
    if _SIGNATURE not in text:
        return text
    signed = _SIGNED.search(text) is not None
    parts = text.split(_SIGNATURE)
    # Text follows a signature: the footer of a mailing list, or the quoted message.
    kept = [parts[0], *(part.partition(_END_OF_SIGNATURE)[2].lstrip("\n") for part in parts[1:])]
    text = _SIGNED.sub("", "".join(kept))
    return _DASHED.sub("", text) if signed else text


def without_scrubbed(text: str) -> str:
    """Return the text without the notes that Mailman's archive writes in place of attachments."""
    return _SCRUBBED.sub("", text) if " next part -" in text else text


def without_uuencoded(text: str) -> str:
    """Return the text without uuencoded files."""
    return _UUENCODED.sub("", text) if "\nbegin " in text or text.startswith("begin ") else text
