"""Convert licence statements to short ids: URLs of Creative Commons, and the sentences that articles use instead."""

from __future__ import annotations

import re

_URL = re.compile(
    r"creativecommons\.org/(?:licen[cs]es/([a-z]{2}(?:-[a-z]{2}){0,2})/?(\d\.\d)?(?:/(igo))?|publicdomain/(zero|mark))",
    re.IGNORECASE,
)
_SHORT = re.compile(r"\bCC[ -]?BY((?:[ -](?:NC|ND|SA)){0,2})\b[ -]*(\d\.\d)?", re.IGNORECASE)
_NAMED = re.compile(
    r"creative\s+commons?,?\s+(?:public\s+)?attribution((?:[\s–—/-]+(?:non[\s-]?commercial|share[\s-]?alike|no[\s-]?deriv\w*))*)"
    r"(?:[\s–—-]+works?)?(?:\s+unported)?(?:\s+(?:public\s+)?licen[cs]e)?,?\s*\(?(?:version\s+)?(\d\.\d)?",
    re.IGNORECASE,
)


def licence_id(statement: str) -> str | None:
    """Return the SPDX-like id of the first licence that a URL or a sentence names, or `None`.

    >>> licence_id("http://creativecommons.org/licenses/by-nc/3.0")
    'CC-BY-NC-3.0'
    >>> licence_id("under the terms of the Creative Commons Attribution Non-Commercial License 4.0")
    'CC-BY-NC-4.0'
    >>> licence_id("CC0 1.0 Universal"), licence_id("All rights reserved")
    ('CC0-1.0', None)
    """
    if found := _URL.search(statement):
        kind, version, igo, public = found.groups()
        if public:
            return "CC0-1.0" if public.lower() == "zero" else "public-domain"
        return "-".join(part for part in ("CC", kind.upper(), version, igo and "IGO") if part)
    if found := _SHORT.search(statement):
        parts = found[1].upper().replace(" ", "-")
        return f"CC-BY{parts}" + (f"-{found[2]}" if found[2] else "")
    if found := _NAMED.search(statement):
        return _from_words(found[1].lower(), found[2])
    lowered = statement[:2000].lower()
    if "cc0" in lowered or "public domain dedication" in lowered:
        return "CC0-1.0"
    return "public-domain" if "public domain" in lowered else None


def _from_words(words: str, version: str | None) -> str:
    parts = ["CC", "BY"]
    parts += [short for name, short in (("non", "NC"), ("share", "SA"), ("deriv", "ND")) if name in words]
    return "-".join([*parts, version] if version else parts)
