r"""Labels and citations: the text of `\ref` and `\cite`. Counters follow LaTeX; labels are resolved at the end."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_PLACE = re.compile("\x05([^\x06]*)\x06")
_NATBIB = re.compile(r"\s*(.+?)\s*\(\s*(\d{4}[a-z]?|in press|n\.d\.|[^()]{0,30})\s*\)(.*)", re.DOTALL)
_ROMAN = ((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))


def roman(number: int) -> str:
    """Return a section number as physics journals print it.

    >>> roman(4), roman(19)
    ('IV', 'XIX')
    """
    out = ""
    for value, letters in _ROMAN:
        while number >= value and len(out) < 20:
            out += letters
            number -= value
    return out


@dataclass(slots=True)
class Labels:
    """Counters, and the labels set so far."""

    style: str = "arabic"
    equations_within_sections: bool = False
    known: dict[str, tuple[str, str]] = field(default_factory=dict)
    current: tuple[str, str] = ("", "")
    _sections: list[int] = field(default_factory=lambda: [0] * 7)
    _counters: dict[str, int] = field(default_factory=dict)
    _appendix: bool = False

    def section(self, level: int) -> None:
        """Begin a numbered heading of this level."""
        if level > 4:
            self.current = ("Section", self._section_number(4))
            return
        self._sections[level] += 1
        self._sections[level + 1 :] = [0] * (6 - level)
        if level <= 2:
            for counter in [name for name in self._counters if name.startswith("in:")]:
                self._counters[counter] = 0
        self.current = ("Appendix" if self._appendix else "Section", self._section_number(level))

    def appendix(self) -> None:
        """Number the following sections by letters."""
        self._appendix = True
        self._sections = [0] * 7

    def _section_number(self, level: int) -> str:
        numbers = self._sections[1 if self._sections[1] else 2 : level + 1]
        if not numbers:
            return ""
        first = str(numbers[0])
        if self._appendix and 0 < numbers[0] <= 26:
            first = chr(64 + numbers[0])
        elif self.style != "arabic":
            first = roman(numbers[0])
            if len(numbers) > 1 and 0 < numbers[1] <= 26:
                return f"{first}{'-' if self.style == 'ieee' else ' '}{chr(64 + numbers[1])}"
        return ".".join([first, *map(str, numbers[1:])])

    def number(self, kind: str, counter: str, within_section: bool = False) -> str:
        """Return the next number of a figure, table, theorem or equation; the labels that follow refer to it."""
        name = f"in:{counter}" if within_section else counter
        self._counters[name] = self._counters.get(name, 0) + 1
        text = str(self._counters[name])
        if within_section:
            text = f"{self._section_number(1 if self._sections[1] else 2)}.{text}"
        self.current = (kind, text)
        return text

    def equation(self) -> str:
        """Return the next number of an equation."""
        return self.number("Equation", "equation", self.equations_within_sections)

    def set(self, label: str) -> None:
        """Bind a label to what was numbered last."""
        if label and self.current[1]:
            self.known[label] = self.current


def reference_mark(label: str, style: str) -> str:
    """Return the placeholder of a reference until all labels are known."""
    return f"\x05{style}\x07{label}\x06"


def resolved(text: str, labels: Labels) -> str:
    """Return the text with every reference as LaTeX prints it; one to an unknown label as the label in brackets.

    The argument of an unknown command is a reference if it is a label (style "perhaps"); else a name with a colon says
    nothing to a reader, and any other is text.
    """

    def print_(found: re.Match[str]) -> str:
        style, _, names = found[1].partition("\x07")
        if style == "perhaps" and names not in labels.known:
            return "" if ":" in names else names
        printed = []
        kind = ""
        for name in names.split(",")[:50]:
            kind, number = labels.known.get(name.strip(), ("", ""))
            text = number or f"[{name.strip()}]"
            printed.append(f"({text})" if number and style == "equation" else text)
        listed = ", ".join(printed)
        if style == "named" and kind:
            listed = f"{kind}{'s' if len(printed) > 1 else ''} {listed}"
        return listed

    return _PLACE.sub(print_, text)


@dataclass(slots=True)
class Citations:
    """The keys of the bibliography with their numbers, or the authors and years that natbib prints."""

    numbers: dict[str, str] = field(default_factory=dict)
    authors: dict[str, tuple[str, str]] = field(default_factory=dict)
    plain_cite: str = "citet"
    """The natbib command that a bare `\\cite` stands for where authors and years are printed."""

    def add(self, key: str, label: str) -> str:
        """Add an entry and return its mark in the list."""
        number = str(len(self.numbers) + 1)
        found = _NATBIB.match(label) if label else None
        if found and found[2]:
            self.authors[key] = (found[1], found[2])
            self.numbers[key] = number
            return ""
        self.numbers[key] = label.strip() if 0 < len(label.strip()) < 30 else number
        return f"[{self.numbers[key]}]"

    def cite(self, command: str, keys: list[str], before: str, after: str) -> str:
        """Return the text of a citation: numbers in brackets, natbib's authors and years, else pandoc's `[@key]`."""
        lead, tail = f"{before} " if before else "", f", {after}" if after else ""
        name = command.lstrip("\\").rstrip("*").lower()
        if keys and all(key in self.authors for key in keys):
            return self._by_author(name, keys, lead, tail)
        known = [self.numbers.get(key) for key in keys]
        if keys and all(known):
            return f"[{lead}{', '.join(filter(None, known))}{tail}]"
        return "[" + lead + "; ".join(f"@{key}" for key in keys) + tail + "]"

    def _by_author(self, name: str, keys: list[str], lead: str, tail: str) -> str:
        pairs = [self.authors[key] for key in keys]
        name = self.plain_cite if name == "cite" else name
        if name in ("citet", "textcite", "citen", "citea", "citeasnoun", "shortcite", "onlinecite"):
            tails = [""] * (len(pairs) - 1) + [tail]
            return lead + "; ".join(f"{a} ({year}{end})" for (a, year), end in zip(pairs, tails, strict=True))
        if "author" in name and "year" not in name:
            return "; ".join(author for author, _ in pairs)
        if name == "citeyear":
            return ", ".join(year for _, year in pairs)
        if name in ("citealt", "citealp"):
            return lead + "; ".join(f"{author} {year}" for author, year in pairs) + tail
        if name == "citeyearpar":
            return f"({lead}{', '.join(year for _, year in pairs)}{tail})"
        return f"({lead}{'; '.join(f'{author}, {year}' for author, year in pairs)}{tail})"
