"""Tables of commands and environments (`commands.yaml`), and of symbols, accents and units (`symbols.yaml`)."""

from __future__ import annotations

import unicodedata

from piledriver.corpus.text.data_table import data_table, names_by_value

_TABLES = data_table(__package__, "commands.yaml")


def _commands(table: dict[int, str]) -> dict[str, int]:
    return {f"\\{name}": value for name, value in names_by_value(table).items()}


def _names(key: str, prefix: str = "") -> frozenset[str]:
    return frozenset(f"{prefix}{name}" for name in _TABLES[key].split())


DROPPED_ARGUMENTS = _commands(_TABLES["dropped_arguments"])
DIMENSIONS = _names("dimensions", "\\")
SECTIONS = _commands(_TABLES["sections"])
CITATIONS = _names("citations", "\\")
REFERENCES = _names("references", "\\")
DROPPED_ENVIRONMENTS = _names("dropped_environments")
ENVIRONMENT_ARGUMENTS: dict[str, int] = names_by_value(_TABLES["environment_arguments"])
MATH_ENVIRONMENTS: dict[str, str] = names_by_value(_TABLES["math_environments"])
NUMBERED_MATH = _names("numbered_math")
TABLES: dict[str, int] = names_by_value(_TABLES["tables"])
LISTS = _names("lists")
NUMBERED_LISTS = _names("numbered_lists")
QUOTES = _names("quotes")
FLOATS: dict[str, str] = names_by_value(_TABLES["floats"])
THEOREMS: dict[str, str] = names_by_value(_TABLES["theorems"])
LINE_BREAK = "\x04"
"""A line break inside a paragraph, until the paragraph is written."""
ALGORITHM: dict[str, tuple[str, str | None]] = {
    name: (before.replace("\n", LINE_BREAK), after) for name, (before, after) in _TABLES["algorithm"].items()
}
"""Pseudo-code: what a command prints before and after its argument; `None` where it takes none."""
_PRINTED = data_table(__package__, "symbols.yaml")
SYMBOLS: dict[str, str] = {f"\\{name}": text for name, text in _PRINTED["symbols"].items()}
UNITS: dict[str, str] = _PRINTED["units"]
_COMBINING: dict[str, str] = _PRINTED["accents"]
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
