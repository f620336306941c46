"""Convert `{{...}}` to what a reader sees of it: the text of templates in the tables, nothing for others.

Only what is written in the call is shown: no unit is converted and no age computed.
"""

from __future__ import annotations

import re

from piledriver.corpus.formats.wikitext.template_handlers import HANDLERS, SYMBOLS, Call

_LANGUAGE_NAME = re.compile(r"lang-[a-z]{2,3}(?:-[a-z]+)*")


def template_to_text(parts: list[str], title: str) -> str:
    """Return what a reader sees of `{{...}}`, given its parts between the bars."""
    name = parts[0].strip().replace("_", " ")
    if "\n" in name:
        name = name.split("\n", 1)[0].strip()
    lowered = name.lower().removeprefix("template:").removeprefix("subst:")
    symbol = SYMBOLS.get(lowered)
    if symbol is not None:
        return symbol
    handler = HANDLERS.get(lowered)
    if handler is not None:
        return handler(Call(parts[1:], lowered, title))
    if ":" in lowered:
        function, _, first = parts[0].strip().partition(":")
        return _parser_function(function.strip().lower(), first.strip(), [part.strip() for part in parts[1:]])
    if lowered.startswith(("cite ", "citation", "vcite ")) and lowered != "citation needed":
        return citation_to_text(Call(parts[1:], lowered, title).named)
    if lowered in ("pagename", "fullpagename", "basepagename", "subpagename"):
        return title
    if _LANGUAGE_NAME.fullmatch(lowered):
        return Call(parts[1:], lowered, title).at(1)
    return ""


def _parser_function(function: str, first: str, rest: list[str]) -> str:
    if function in ("lc", "uc", "lcfirst", "ucfirst", "formatnum", "nowrap", "anchorencode", "urlencode"):
        cased = {"lc": str.lower, "uc": str.upper}.get(function)
        if cased is not None:
            return cased(first)
        if function == "ucfirst":
            return first[:1].upper() + first[1:]
        return first[:1].lower() + first[1:] if function == "lcfirst" else first
    if function in ("#if", "#ifexist", "#iferror", "#ifexpr"):
        index = 0 if first and function == "#if" else 1
        return rest[index] if index < len(rest) else ""
    if function == "#ifeq":
        index = 1 if rest and rest[0] == first else 2
        return rest[index] if index < len(rest) else ""
    if function == "#dateformat" or function == "formatdate":
        return first
    return ""


def citation_to_text(named: dict[str, str]) -> str:
    """Return a `{{cite book|...}}` of a list of works as one line: author, date, title, publication.

    >>> citation_to_text({"last": "Kropotkin", "first": "P.", "title": "Fields", "year": "1899"})
    'Kropotkin, P. (1899). Fields.'
    """
    authors = "; ".join(_people(named))
    date = named.get("date") or named.get("year") or ""
    title = named.get("title") or named.get("script-title") or ""
    chapter = named.get("chapter") or named.get("contribution") or ""
    within = _first(named, "work", "journal", "newspaper", "magazine", "website", "encyclopedia", "periodical")
    publisher = _first(named, "publisher", "institution")
    place = _first(named, "location", "place")
    start = f"{authors} ({date})" if authors and date else authors or ""
    end = ": ".join(part for part in (place, publisher) if part)
    isbn = f"ISBN {named['isbn']}" if named.get("isbn") else ""
    parts = [start, chapter, title, within, end, "" if start and date else date, isbn]
    shown = ". ".join(" ".join(part.split()).rstrip(".") for part in parts if part.strip())
    return f"{shown}." if shown else ""


def _people(named: dict[str, str]) -> list[str]:
    people = []
    for number in ("", "1", "2", "3", "4", "5", "6"):
        last = named.get(f"last{number}") or named.get(f"author{number}") or named.get(f"surname{number}") or ""
        first = named.get(f"first{number}") or named.get(f"given{number}") or ""
        if last:
            person = f"{last}, {first}" if first else last
            if person not in people:
                people.append(person)
    if not people and (listed := _first(named, "vauthors", "authors", "people")):
        return [listed]
    return people or (
        [f"{named['editor-last']}, {named.get('editor-first', '')}".rstrip(", ")] if named.get("editor-last") else []
    )


def _first(named: dict[str, str], *keys: str) -> str:
    return next((named[key] for key in keys if named.get(key)), "")
