"""Measures in templates: the number and unit that the editor wrote, without the converted ones."""

from __future__ import annotations

import re

from piledriver.corpus.text.data_table import data_table

_NUMBER = re.compile(r"[-+−–±]?[.,]?\d[\d.,/+⁄ e-]{0,40}")
_TABLES = data_table(__package__, "measures.yaml")
_RANGE_WORDS: dict[str, str] = _TABLES["ranges"]
_UNITS: dict[str, str] = _TABLES["units"]
_PAIRS = {(first, second) for first, second in _TABLES["pairs"]}


def unit_name(unit: str) -> str:
    """Return a unit as it is printed."""
    return _UNITS.get(unit.lower(), unit)


def convert_to_text(arguments: list[str]) -> str:
    """Return the values of `{{convert|5|to|10|km|mi}}` with the unit they were given in.

    >>> convert_to_text(["5", "to", "10", "km2", "sqmi"]), convert_to_text(["6", "ft", "2", "in", "m"])
    ('5 to 10 km²', '6 ft 2 in')
    """
    shown = ""
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        if argument in _RANGE_WORDS and shown:
            shown += _RANGE_WORDS[argument]
        elif _NUMBER.fullmatch(argument):
            if at + 1 < len(arguments) and arguments[at + 1] in _RANGE_WORDS:
                shown += argument
            else:
                unit = arguments[at + 1] if at + 1 < len(arguments) else ""
                space = "" if unit.startswith("/") else " "
                shown += f"{argument}{space}{unit_name(unit)}".strip()
                following = arguments[at + 2] if at + 2 < len(arguments) else ""
                # `6|ft|2|in` is one measure; otherwise the next number is the rounding of the conversion.
                pair = (unit, arguments[at + 3] if at + 3 < len(arguments) else "")
                if _NUMBER.fullmatch(following) and pair in _PAIRS:
                    return f"{shown} {following} {unit_name(pair[1])}"
                return shown
        elif not shown:
            return argument
        at += 1
    return shown


def height_to_text(named: dict[str, str]) -> str:
    """Return the text of `{{height|ft=5|in=3}}`."""
    for unit in ("m", "cm"):
        if unit in named:
            return f"{named[unit]} {unit}"
    return " ".join(f"{named[unit]} {unit}" for unit in ("ft", "in") if named.get(unit))


def value_to_text(arguments: list[str], named: dict[str, str]) -> str:
    """Return the text of `{{val|1.5|0.1|e=6|u=km}}`."""
    numbers = [value for value in arguments if value]
    if not numbers:
        return ""
    shown = numbers[0] + (f" ± {numbers[1]}" if len(numbers) > 1 else "")
    if named.get("e"):
        shown += f"×10^{named['e']}"
    unit = named.get("u") or named.get("ul") or ""
    return f"{shown} {unit}".strip() + named.get("p-", "")
