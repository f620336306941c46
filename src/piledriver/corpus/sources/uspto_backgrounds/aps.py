"""Green Book (APS), the text format of US patents from 1976 to 2001: lettered fields, named characters."""

from __future__ import annotations

import re
from collections.abc import Iterator

from piledriver.corpus.formats.markdown import lowered, raised
from piledriver.corpus.text.data_table import data_table

_TABLES = data_table(__package__, "aps.yaml")
_GREEK: dict[str, str] = _TABLES["greek"]
_CAPITALS = {name.upper(): letter.upper() for name, letter in _GREEK.items()}
_NAMED: dict[str, str] = {**_GREEK, **_CAPITALS, **_TABLES["characters"]}
_NAME = re.compile(r"\.(?!sub\.|sup\.)([A-Za-z+\-][A-Za-z0-9/+\- ]{0,15})\.")
_SCRIPT = re.compile(
    r"\.(sub|sup)\.([A-Za-z0-9+\-−'=*]{1,12}(?:\.\d{1,4}(?![\d.]))?)( (?=[A-Z(][a-z]?(?![a-z])|-[A-Z(]))?"
)
_IMAGE = re.compile(r"##(?:EQU|STR|TBL|SPC|DRW)[0-9]{1,6}##")
_FIELD = re.compile(r"([A-Z][A-Z0-9]{2,3})(?:  ?(.*))?$")


def fields(document: str) -> Iterator[tuple[str, str]]:
    """Yield (code, text) of each field in order; continuation lines begin with spaces. A section's name has no text.

    >>> list(fields("PATN\\nTTL  A boat\\n      loader\\nBSUM\\nPAR  It floats."))
    [('PATN', ''), ('TTL', 'A boat loader'), ('BSUM', ''), ('PAR', 'It floats.')]
    """
    code = ""
    parts: list[str] = []

    def joined() -> str:
        if code != "TBL":
            return " ".join(parts)
        # Tables are aligned with spaces; their rules are underscores.
        return "\n".join(part for part in parts if part.strip("_ "))

    for line in document.split("\n"):
        line = line.rstrip()
        found = _FIELD.match(line) if line[:1].isupper() else None
        if found is not None and (found[2] is None or line[len(found[1]) : len(found[1]) + 1] == " "):
            if code:
                yield code, joined()
            code, parts = found[1], [found[2].strip()] if found[2] else []
        elif line.strip():
            parts.append(line[5:] if code == "TBL" and line[:5].isspace() else line.strip())
    if code:
        yield code, joined()


def characters(text: str) -> str:
    """Return text with named characters and scripts as Unicode, without the marks of pictures.

    >>> characters("H.sub.2 O at 10.degree. C. and .alpha.-iron, 10.sup.-3 M ##EQU1##")
    'H₂O at 10° C. and α-iron, 10⁻³ M '
    """
    if "##" in text:
        text = _IMAGE.sub("", text)
    if "." not in text:
        return text
    text = _SCRIPT.sub(_script, text)
    return _NAME.sub(lambda found: _NAMED.get(found[1], found[0]), text)


def _script(found: re.Match[str]) -> str:
    # A space ends a script. After a subscript it is inside a formula (H.sub.2 O) and dropped; after a superscript kept.
    if found[1] == "sub":
        return lowered(found[2])
    return raised(found[2]) + (found[3] or "")
