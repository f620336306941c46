"""`{{cite book|...}}` in a list of works: author, date, title, where it appeared. In references it is gone before."""

from __future__ import annotations


def citation_to_text(named: dict[str, str]) -> str:
    """One line as a bibliography has it, made only of what the parameters say.

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
    return people or (
        [f"{named['editor-last']}, {named.get('editor-first', '')}".rstrip(", ")] if named.get("editor-last") else []
    )


def _first(named: dict[str, str], *keys: str) -> str:
    return next((named[key] for key in keys if named.get(key)), "")
