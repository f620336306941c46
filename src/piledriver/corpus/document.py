"""Documents, and what was rejected: the values that the corpus room passes around."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec


class Document(msgspec.Struct, frozen=True, gc=False):
    """A text with its origin: `source` is the `pile_set_name`; `meta` holds licence, origin and more.

    >>> document = make_document("Call me Ishmael.", source="Gutenberg (PG-19)", origin="2701.txt")
    >>> document.id, document.meta["origin"]
    ('7b52249588135337c95160f5467a4d37', '2701.txt')
    """

    text: str
    id: str = ""
    source: str = ""
    meta: dict[str, Any] = {}


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """Something that a source rejected. `reason` is a short stable phrase to count by; `detail` is for people.

    A reason is lower case and names the rule ("no abstract", "score below 3", "invalid xml"), never a value.
    """

    reason: str
    origin: str
    detail: str = ""
    source: str = ""


class RejectedError(ValueError):
    """Raised where content is rejected: `reason` is the reason of the refusal, the message its detail."""

    reason = "rejected"

    def __init__(self, detail: str, reason: str | None = None) -> None:
        super().__init__(detail)
        self.reason = reason or type(self).reason


def make_document(text: str, *, source: str, origin: str, licence: str | None = None, **meta: Any) -> Document:
    """Return a document with its stable id; `origin` locates it (file, archive member, record id, URL)."""
    described = {"origin": origin, **({"licence": licence} if licence else {}), **meta}
    return Document(
        text, document_id(text, source, origin), source, {k: v for k, v in described.items() if v is not None}
    )


def document_id(text: str, source: str, origin: str) -> str:
    """Return the stable id of a document: 128 bits of blake2b over source, origin and text."""
    digest = hashlib.blake2b(digest_size=16, person=b"pd-document")
    for part in (source, origin, text):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def to_line(document: Document) -> bytes:
    """Encode a line of a shard: `{"text": ..., "meta": {"pile_set_name": ..., "id": ..., ...}}` with its newline."""
    row = {"text": document.text, "meta": {"pile_set_name": document.source, "id": document.id, **document.meta}}
    return _line(row)


def refusal_line(refusal: Refusal) -> bytes:
    """Encode a line of a file of rejects, with its newline.

    >>> refusal_line(Refusal("invalid csv", "a.csv#line 2", "odd \\udc92"))
    b'{"reason":"invalid csv","origin":"a.csv#line 2","detail":"odd ?","source":""}\\n'
    """
    return _line(msgspec.structs.asdict(refusal))


def _line(row: dict[str, Any]) -> bytes:
    try:
        return _encoder.encode(row) + b"\n"
    except (UnicodeEncodeError, ValueError):
        return _encoder.encode(replace_surrogates(row)) + b"\n"


_encoder = msgspec.json.Encoder()


def replace_surrogates(value: Any) -> Any:
    """Return a JSON value with `?` for each lone surrogate, which UTF-8 cannot encode.

    >>> replace_surrogates({"a": ["\\ud83d\\ude00", "b\\ud800"]})
    {'a': ['😀', 'b?']}
    """
    if isinstance(value, str):
        joined = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return joined.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    return [replace_surrogates(item) for item in value] if isinstance(value, list) else value
