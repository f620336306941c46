"""Cues, the common form of timed text: a start, an end and lines."""

from __future__ import annotations

import html
import re
from itertools import pairwise

import msgspec

_TAG = re.compile(
    r"</?(?:i|b|u|s|em|strong|font|c|v|lang|ruby|rt|span|br)(?=[\s>/.])[^<>]{0,300}>|<\d[\d:.]{3,14}>", re.IGNORECASE
)
_OVERRIDE = re.compile(r"\{\\[^{}]{0,200}\}|\{[a-zA-Z]:[^{}]{0,60}\}")


class Cue(msgspec.Struct, frozen=True, gc=False):
    """Lines that are on the screen from `start` to `end`, in seconds."""

    start: float
    end: float
    lines: list[str]


def seconds(clock: str) -> float:
    """Return the seconds of `01:02:03,400`, `02:03.400`, `83.4s` or plain seconds; 0 where it cannot be parsed.

    >>> seconds("01:02:03,400"), seconds("2:03.5"), seconds("83.4s")
    (3723.4, 123.5, 83.4)
    """
    total = 0.0
    try:
        if ":" not in clock and clock[-1:].isdigit() and "," not in clock:
            total = float(clock)
            return total if 0 <= total < 1e8 else 0.0
        for part in clock.strip().rstrip("s").replace(",", ".").split(":"):
            total = total * 60 + float(part)
    except ValueError:
        return 0.0
    return round(total, 3) if 0 <= total < 1e8 else 0.0


def cleaned(line: str) -> str:
    """Return a line without formatting tags, positions and entities."""
    if "<" in line:
        line = _TAG.sub("", line)
    if "{" in line:
        line = _OVERRIDE.sub("", line)
    if "&" in line:
        line = html.unescape(line)
    if "\\N" in line or "\u200b" in line:
        line = line.replace("\\N", " ").replace("\u200b", "")
    return " ".join(line.split())


def lines_of(text: str) -> list[str]:
    """Return the lines of one of YouTube's cues, whose text is escaped before it is written to XML or JSON."""
    if "&" in text:
        text = html.unescape(text)
    return [line for raw in text.split("\n") if (line := cleaned(raw))]


def without_rolling(cues: list[Cue]) -> list[Cue]:
    """Return the cues of roll-up captions, which repeat each line, with each line once, where it first appears."""
    rolled: list[Cue] = []
    before: list[str] = []
    for cue in cues:
        lines = cue.lines
        # The longest end of the previous lines that this cue starts with.
        kept = next((k for k in range(min(len(before), len(lines)), 0, -1) if before[-k:] == lines[:k]), 0)
        new = lines[kept:]
        if lines:
            before = lines
        if new:
            rolled.append(Cue(cue.start, cue.end, new))
    return rolled


def looks_rolling(cues: list[Cue]) -> bool:
    """Return whether many cues start with the last line of the cue before, as in roll-up captions."""
    pairs = [(a.lines, b.lines) for a, b in pairwise(cues) if a.lines and b.lines]
    return len(pairs) >= 4 and sum(a[-1] == b[0] for a, b in pairs) > len(pairs) * 0.4
