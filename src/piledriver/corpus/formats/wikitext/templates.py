"""`{{...}}` to what a reader sees of it: words where the table knows the template, nothing otherwise.

Only what is written in the call is shown: no unit is converted and no age computed, so that nothing is invented.
"""

from __future__ import annotations

import re

from piledriver.corpus.formats.wikitext.calls import Call
from piledriver.corpus.formats.wikitext.citations import citation_to_text
from piledriver.corpus.formats.wikitext.template_handlers import HANDLERS, SYMBOLS

_LANGUAGE_NAME = re.compile(r"lang-[a-z]{2,3}(?:-[a-z]+)*")


def template_to_text(parts: list[str], title: str) -> str:
    """What a reader sees of `{{...}}`, given its parts between the bars."""
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
