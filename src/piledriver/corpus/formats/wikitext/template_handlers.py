"""Handlers of templates: `templates.yaml` lists them, the functions here convert those that no pattern describes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from piledriver.corpus.formats.wikitext.marks import EQUALS, LINE_BREAK
from piledriver.corpus.formats.wikitext.measures import convert_to_text, height_to_text, value_to_text
from piledriver.corpus.text.data_table import data_table, word_set


class Call:
    """The arguments of a template: by position (from 1) and by name."""

    __slots__ = ("name", "named", "positional", "title")

    def __init__(self, parts: list[str], name: str, title: str) -> None:
        self.name = name
        self.title = title
        self.positional: list[str] = []
        self.named: dict[str, str] = {}
        for part in parts:
            key, equals, value = part.partition("=")
            key = key.strip()
            if equals and len(key) < 40 and "<" not in key and "[" not in key and "\n" not in key:
                if key.isascii() and key.isdigit() and 0 < int(key) < 100:
                    index = int(key)
                    self.positional += [""] * (index - len(self.positional))
                    self.positional[index - 1] = value.strip()
                else:
                    self.named[key.lower()] = value.strip()
            else:
                self.positional.append(part.strip())

    def at(self, index: int) -> str:
        """Return a positional argument, counted from 1; an empty string where it is not given."""
        return self.positional[index - 1] if index <= len(self.positional) else ""

    def given(self) -> list[str]:
        """Return the positional arguments that are not empty."""
        return [value for value in self.positional if value]


def _words(*parts: str, by: str = " ") -> str:
    return by.join(part for part in parts if part)


Handler = Callable[[Call], str]
_CODE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z]{2,8}){0,2}")
_SOUND_SWITCHES = word_set("us uk uslang uklang us: local en lang pron audio ipa rp ga also")
_FUNCTIONS: dict[str, Handler] = {
    "annotated_link": lambda call: call.at(1) or call.named.get("link", ""),
    "chemical": lambda call: "".join(f"<sub>{part}</sub>" if part.isdigit() else part for part in call.positional),
    "circa": lambda call: "c. " + " – c. ".join(call.given()) if call.given() else "c.",
    "convert": lambda call: convert_to_text(call.positional),
    "height": lambda call: height_to_text(call.named),
    "in_language": lambda call: call.at(2) if _CODE.fullmatch(call.at(1)) else call.at(1),
    "items": lambda call: _listed("*", [item.lstrip("* ") for item in call.given()]),
    "last": lambda call: call.given()[-1] if call.given() else "",
    "numbered": lambda call: _listed("#", call.given()),
    "page_title": lambda call: call.named.get("title") or call.title,
    "paragraph": lambda call: f"\n\n{call.at(1)}\n\n" if call.at(1) else "",
    "poem": lambda call: call.at(1).replace("\n", LINE_BREAK),
    "sort_name": lambda call: _words(call.at(1), call.at(2)),
    "value": lambda call: value_to_text(call.positional, call.named),
    "web_address": lambda call: call.at(2) or call.at(1) or call.named.get("1", ""),
}
_MONTHS = str.split("January February March April May June July August September October November December")


def _function(handler: Handler) -> Handler:
    _FUNCTIONS[handler.__name__.removeprefix("_")] = handler
    return handler


def _listed(mark: str, items: list[str]) -> str:
    return "\n" + "\n".join(f"{mark} {item}" for item in items) + "\n" if items else ""


@_function
def _pronunciation(call: Call) -> str:
    sounds = "".join(part for part in call.positional if part.lower() not in _SOUND_SWITCHES)
    return f"/{sounds}/" if sounds else ""


@_function
def _ship(call: Call) -> str:
    return _words(call.at(1), call.at(2)) if call.name == "ship" else _words(call.name.upper(), call.at(1))


@_function
def _quote(call: Call) -> str:
    text = call.at(1) or call.named.get("text", "") or call.named.get("quote", "")
    author = call.named.get("author", "") or call.named.get("sign", "") or call.at(2)
    source = call.named.get("source", "") or call.named.get("title", "")
    credit = _words(author, source, by=", ")
    return f"\n\n{text}\n\n" + (f"— {credit}\n\n" if credit else "") if text else ""


@_function
def _content(call: Call) -> str:
    # `{{plainlist|` and the like hold whole lists.
    text = call.at(1) or call.named.get("content", "") or call.named.get("list", "")
    return f"\n{text}\n" if text else ""


@_function
def _date(call: Call) -> str:
    numbers = [part for part in call.positional if part]
    if not numbers:
        return ""
    if not numbers[0].lstrip("-").isdigit():
        return numbers[0]
    year, month = numbers[0], _month(numbers[1]) if len(numbers) > 1 else ""
    if not month:
        return year
    day = numbers[2].lstrip("0") if len(numbers) > 2 and numbers[2].isdigit() else ""
    if not day:
        return f"{month} {year}"
    return f"{day} {month} {year}" if call.named.get("df", "")[:1].lower() == "y" else f"{month} {day}, {year}"


def _month(text: str) -> str:
    if text.isdigit():
        return _MONTHS[int(text) - 1] if 1 <= int(text) <= 12 else ""
    return text if text.isalpha() else ""


@_function
def _as_of(call: Call) -> str:
    alternative = call.named.get("alt", "")
    if alternative:
        return alternative
    words = "as of" if call.named.get("lc", "")[:1].lower() == "y" else "As of"
    date = [part for part in (call.at(3), _month(call.at(2)), call.at(1)) if part]
    return f"{words} {' '.join(date)}" if date else ""


@_function
def _nihongo(call: Call) -> str:
    inside = _words(call.at(2), call.at(3), by=", ")
    return f"{call.at(1)} ({inside})" if inside and call.at(1) else call.at(1) or inside


@_function
def _chinese(call: Call) -> str:
    keys = ("c", "s", "t", "p", "w", "j", "tp", "hanja", "l")
    return "; ".join(call.named[key] for key in keys if call.named.get(key)) or call.at(1)


@_function
def _phonetic(call: Call) -> str:
    """Return the sounds: `{{IPA|de|ˈtaːk}}` and `{{IPA-de|ˈtaːk|lang}}` print brackets, `{{IPA|ˈtaːk}}` does not."""
    if call.name == "ipa":
        return f"[{call.at(2)}]" if call.at(2) and _CODE.fullmatch(call.at(1)) else call.at(1)
    sounds = call.at(1)
    return sounds if not sounds or sounds[0] in "[/⟨(" else f"[{sounds}]"


@_function
def _tracks(call: Call) -> str:
    """Return the songs of an album as a numbered list."""
    lines = []
    for number in range(1, 100):
        title = call.named.get(f"title{number}")
        if title is None:
            break
        length = call.named.get(f"length{number}", "")
        lines.append(title + (f" ({length})" if length else ""))
    return _listed("#", lines)


@_function
def _episode(call: Call) -> str:
    """Return the title and the summary of a row in a list of episodes."""
    title, summary = call.named.get("title", ""), call.named.get("shortsummary", "")
    shown = _words(title, summary, by="\n\n")
    return f"\n\n{shown}\n\n" if shown else ""


@_function
def _squad_player(call: Call) -> str:
    parts = (call.named.get(key, "") for key in ("no", "pos", "name", "other"))
    return _listed("*", [_words(*parts)]) if call.named.get("name") else ""


@_function
def _event(call: Call) -> str:
    when, what = call.named.get("date", "") or call.at(1), call.named.get("event", "") or call.at(2)
    return f"\n* {when}: {what}\n" if when and what else ""


@_function
def _fraction(call: Call) -> str:
    numbers = call.given()
    if len(numbers) == 3:
        return f"{numbers[0]} {numbers[1]}/{numbers[2]}"
    return "/".join(numbers) if len(numbers) == 2 else f"1/{numbers[0]}" if numbers else ""


_MAKERS: dict[str, Callable[[Any], Handler]] = {
    "argument": lambda index: lambda call: call.at(index),
    "join": lambda separator: lambda call: separator.join(call.given()),
    "format": lambda pattern: lambda call: pattern.replace("{}", call.at(1), 1) if call.at(1) else "",
    "money": lambda sign: lambda call: f"{sign}{call.at(1)}",
    "function": _FUNCTIONS.__getitem__,
}
_TABLES = data_table(__package__, "templates.yaml")
HANDLERS: dict[str, Handler] = {
    name: handler
    for kind, maker in _MAKERS.items()
    for value, names in _TABLES[kind].items()
    for handler in [maker(value)]
    for name in map(str.strip, names.split(","))
}
SYMBOLS: dict[str, str] = {
    name: {"<br>": LINE_BREAK, "=": EQUALS}.get(text, text) for name, text in _TABLES["text"].items()
}
