"""A call of a template: its name and its arguments."""

from __future__ import annotations


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
        """A positional argument, counted from 1; nothing where it is not given."""
        return self.positional[index - 1] if index <= len(self.positional) else ""

    def given(self) -> list[str]:
        """The positional arguments that are not empty."""
        return [value for value in self.positional if value]
