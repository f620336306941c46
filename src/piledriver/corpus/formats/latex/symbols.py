"""What commands print in text, `symbols.yaml`: symbols, letters, accents, units."""

from __future__ import annotations

import unicodedata

from piledriver.corpus.text.data_table import data_table

_TABLES = data_table(__package__, "symbols.yaml")
SYMBOLS: dict[str, str] = {f"\\{name}": text for name, text in _TABLES["symbols"].items()}
UNITS: dict[str, str] = _TABLES["units"]
_COMBINING: dict[str, str] = _TABLES["accents"]
ACCENTS = frozenset(f"\\{name}" for name in _COMBINING)


def accented(command: str, base: str) -> str:
    r"""Return a letter with its accent; an accent on anything else is dropped.

    >>> accented("\\'", "e"), accented("\\c", "c"), accented('\\"', "ı")
    ('é', 'ç', 'ï')
    """
    if not base:
        return ""
    first = {"ı": "i", "ȷ": "j"}.get(base[0], base[0])
    if not first.isalpha():
        return base
    return unicodedata.normalize("NFC", first + _COMBINING[command[1]]) + base[1:]
