"""Handlers of templates: `templates.yaml` lists them, the functions here convert those that no pattern describes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
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


Handler = Callable[[Call], str]
_FUNCTIONS: dict[str, Handler] = {}
_MONTHS = str.split("January February March April May June July August September October November December")


def _function(handler: Handler) -> Handler:
    _FUNCTIONS[handler.__name__.removeprefix("_")] = handler
    return handler


def _argument(index: int) -> Handler:
    return lambda call: call.at(index)


def _formatted(pattern: str) -> Handler:
    before, _, after = pattern.partition("{}")
    return lambda call: f"{before}{call.at(1)}{after}" if call.at(1) else ""


@_function
def _last(call: Call) -> str:
    return call.given()[-1] if call.given() else ""


def _joined(separator: str) -> Handler:
    return lambda call: separator.join(call.given())


@_function
def _quote(call: Call) -> str:
    text = call.at(1) or call.named.get("text", "") or call.named.get("quote", "")
    author = call.named.get("author", "") or call.named.get("sign", "") or call.at(2)
    source = call.named.get("source", "") or call.named.get("title", "")
    said = ", ".join(part for part in (author, source) if part)
    return f"\n\n{text}\n\n" + (f"— {said}\n\n" if said and text else "") if text else ""


@_function
def _items(call: Call) -> str:
    return "\n" + "\n".join(f"* {item.lstrip('* ')}" for item in call.given()) + "\n" if call.given() else ""


@_function
def _numbered(call: Call) -> str:
    return "\n" + "\n".join(f"# {item}" for item in call.given()) + "\n" if call.given() else ""


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
def _circa(call: Call) -> str:
    return "c. " + " – c. ".join(call.given()) if call.given() else "c."


@_function
def _nihongo(call: Call) -> str:
    inside = ", ".join(part for part in (call.at(2), call.at(3)) if part)
    return f"{call.at(1)} ({inside})" if inside and call.at(1) else call.at(1) or inside


@_function
def _chinese(call: Call) -> str:
    keys = ("c", "s", "t", "p", "w", "j", "tp", "hanja", "l")
    return "; ".join(call.named[key] for key in keys if call.named.get(key)) or call.at(1)


@_function
def _pronunciation(call: Call) -> str:
    sounds = "".join(part for part in call.positional if part.lower() not in _SOUND_SWITCHES)
    return f"/{sounds}/" if sounds else ""


_SOUND_SWITCHES = word_set("us uk uslang uklang us: local en lang pron audio ipa rp ga also")


@_function
def _phonetic(call: Call) -> str:
    """Return the sounds: `{{IPA|de|ˈtaːk}}` and `{{IPA-de|ˈtaːk|lang}}` print brackets, `{{IPA|ˈtaːk}}` does not."""
    if call.name == "ipa":
        return f"[{call.at(2)}]" if call.at(2) and _CODE.fullmatch(call.at(1)) else call.at(1)
    sounds = call.at(1)
    return sounds if not sounds or sounds[0] in "[/⟨(" else f"[{sounds}]"


@_function
def _in_language(call: Call) -> str:
    return call.at(2) if _CODE.fullmatch(call.at(1)) else call.at(1)


@_function
def _tracks(call: Call) -> str:
    """Return the songs of an album as a numbered list."""
    lines = []
    for number in range(1, 100):
        title = call.named.get(f"title{number}")
        if title is None:
            break
        length = call.named.get(f"length{number}", "")
        lines.append(f"# {title}" + (f" ({length})" if length else ""))
    return "\n" + "\n".join(lines) + "\n" if lines else ""


@_function
def _episode(call: Call) -> str:
    """Return the title and the summary of a row in a list of episodes."""
    title, summary = call.named.get("title", ""), call.named.get("shortsummary", "")
    shown = "\n\n".join(part for part in (title, summary) if part)
    return f"\n\n{shown}\n\n" if shown else ""


@_function
def _squad_player(call: Call) -> str:
    parts = (call.named.get(key, "") for key in ("no", "pos", "name", "other"))
    return "\n* " + " ".join(part for part in parts if part) + "\n" if call.named.get("name") else ""


@_function
def _paragraph(call: Call) -> str:
    return f"\n\n{call.at(1) or call.named.get('1', '')}\n\n" if call.at(1) else ""


@_function
def _event(call: Call) -> str:
    when, what = call.named.get("date", "") or call.at(1), call.named.get("event", "") or call.at(2)
    return f"\n* {when}: {what}\n" if when and what else ""


@_function
def _sort_name(call: Call) -> str:
    return " ".join(part for part in (call.at(1), call.at(2)) if part)


@_function
def _ship(call: Call) -> str:
    return _sort_name(call) if call.name == "ship" else f"{call.name.upper()} {call.at(1)}".strip()


@_function
def _fraction(call: Call) -> str:
    numbers = call.given()
    if len(numbers) == 3:
        return f"{numbers[0]} {numbers[1]}/{numbers[2]}"
    return "/".join(numbers) if len(numbers) == 2 else f"1/{numbers[0]}" if numbers else ""


@_function
def _web_address(call: Call) -> str:
    return call.at(2) or call.at(1) or call.named.get("1", "")


def _money(sign: str) -> Handler:
    return lambda call: f"{sign}{call.at(1)}" if call.at(1) else sign


@_function
def _height(call: Call) -> str:
    return height_to_text(call.named)


@_function
def _value(call: Call) -> str:
    return value_to_text(call.positional, call.named)


@_function
def _convert(call: Call) -> str:
    return convert_to_text(call.positional)


@_function
def _page_title(call: Call) -> str:
    return call.named.get("title") or call.title


@_function
def _annotated_link(call: Call) -> str:
    return call.at(1) or call.named.get("link", "")


@_function
def _poem(call: Call) -> str:
    return call.at(1).replace("\n", LINE_BREAK)


@_function
def _chemical(call: Call) -> str:
    return "".join(f"<sub>{part}</sub>" if part.isdigit() else part for part in call.positional)


def _handlers() -> Iterator[tuple[str, Handler]]:
    makers: dict[str, Callable[[Any], Handler]] = {
        "argument": _argument,
        "join": _joined,
        "format": _formatted,
        "money": _money,
        "function": _FUNCTIONS.__getitem__,
    }
    for kind, maker in makers.items():
        for value, names in _TABLES[kind].items():
            handler = maker(value)
            for name in names.split(","):
                yield name.strip(), handler


_CODE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z]{2,8}){0,2}")
_TABLES = data_table(__package__, "templates.yaml")
HANDLERS: dict[str, Handler] = dict(_handlers())
SYMBOLS: dict[str, str] = {
    name: {"<br>": LINE_BREAK, "=": EQUALS}.get(text, text) for name, text in _TABLES["text"].items()
}
