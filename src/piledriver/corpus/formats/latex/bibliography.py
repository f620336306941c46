r"""Convert a bibliography written by biber (`\entry`, `\field`, `\name`) to the list that BibTeX writes."""

from __future__ import annotations

import re

_GROUP = r"\{((?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+)\}"
_ENTRY = re.compile(r"\\entry\{([^{}]{1,200})\}")
_FIELD = re.compile(r"\\(?:field|strng|verb)\{(\w{1,40})\}" + _GROUP)
_NAMES = re.compile(r"\\name\{(author|editor)\}\{\d+\}\{[^{}]*\}\{")
_FAMILY, _GIVEN = re.compile(r"\bfamily=" + _GROUP), re.compile(r"\bgiven=" + _GROUP)
_PARTS = ("title", "journaltitle", "booktitle", "series", "volume", "publisher", "pages", "eprint", "doi")


def is_biber(source: str) -> bool:
    """Return whether a .bbl file holds biblatex's data, not a list."""
    return "\\entry{" in source and "\\field{" in source


def as_list(source: str) -> str:
    r"""Return the entries as a `thebibliography`.

    >>> as_list("\\entry{k}{book}{}\n\\field{title}{T}\n\\field{year}{1984}\n\\endentry")
    '\\begin{thebibliography}{}\n\\bibitem{k} T. 1984.\n\\end{thebibliography}'
    """
    starts = list(_ENTRY.finditer(source))
    items = []
    for found, following in zip(starts, [*starts[1:], None], strict=True):
        body = source[found.end() : following.start() if following else len(source)]
        fields = {name: " ".join(value.split()) for name, value in _FIELD.findall(body)}
        names = _NAMES.search(body)
        people = _people(body[names.end() : body.find("\n      }", names.end())]) if names else ""
        parts = [people, *(fields.get(name, "") for name in _PARTS), fields.get("year", "")]
        items.append(f"\\bibitem{{{found[1]}}} " + " ".join(f"{part.rstrip('.')}." for part in parts if part))
    return "\\begin{thebibliography}{}\n" + "\n".join(items) + "\n\\end{thebibliography}"


def _people(names: str) -> str:
    given = _GIVEN.findall(names)
    people = [
        f"{given[index]} {family}".strip() if index < len(given) else family
        for index, family in enumerate(_FAMILY.findall(names))
    ]
    return ", ".join(people)
