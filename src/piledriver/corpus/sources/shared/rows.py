"""Documents of rows from JSON lines or Parquet: one field is the text, the others become meta."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.sources.base import Found
from piledriver.corpus.text.normalise import NotTextError, decode_text

TEXT_FIELDS = ("text", "content", "raw_content", "body", "document", "article", "maintext", "plain_text", "message")
_META_FIELDS = ("meta", "metadata")
_MAX_DEPTH = 8


def record_document(record: Any, origin: str) -> Found:
    """Return the document of a row: the first of `TEXT_FIELDS` is the text, all other fields are meta.

    >>> record_document({"text": ["a", "b"], "meta": {"pile_set_name": "X"}, "url": "u"}, "f@0").text
    'a\\n\\nb'
    """
    if isinstance(record, str):
        return Document(record, meta={"origin": origin})
    if not isinstance(record, dict):
        return Refusal("not an object", origin, type(record).__name__)
    field = next((name for name in TEXT_FIELDS if isinstance(record.get(name), str | list | bytes)), None)
    if field is None:
        return Refusal("no text field", origin, ", ".join(map(str, record))[:200])
    text = record[field]
    if isinstance(text, bytes):
        # Some programs write text to Parquet columns of bytes.
        try:
            text = decode_text(text)
        except NotTextError as error:
            return Refusal(error.reason, origin, field)
    if isinstance(text, list):
        # lm_dataformat writes lists of paragraphs.
        if not all(isinstance(paragraph, str) for paragraph in text):
            return Refusal("no text field", origin, f"{field} is not text")
        text = "\n\n".join(text)
    return Document(text, meta={"origin": origin, **_meta(record, field)})


def _meta(record: dict[str, Any], text_field: str) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    for name, value in record.items():
        if name in _META_FIELDS and isinstance(value, dict):
            meta.update({str(key): _json_value(inner) for key, inner in value.items()})
        elif name != text_field:
            meta[str(name)] = _json_value(value)
    # Reserved names: a foreign value is kept under another name.
    renamed = {"pile_set_name": "original_pile_set_name", "id": "original_id", "origin": "original_origin"}
    for theirs, ours in {**renamed, "source": "original_source", "text": "original_text", "license": "licence"}.items():
        if theirs in meta:
            meta.setdefault(ours, meta.pop(theirs))
    return {key: value for key, value in meta.items() if value is not None}


def _json_value(value: Any, depth: int = 0) -> Any:
    """Return a value that JSON can hold."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if depth >= _MAX_DEPTH:
        return str(value)[:200]
    if isinstance(value, dict):
        return {str(key): _json_value(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner, depth + 1) for inner in value]
    return str(value) if isinstance(value, decimal.Decimal) else None
