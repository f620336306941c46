"""Stop strings in a stream of text: neither a part of one nor text after one is ever emitted."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string in text that arrives in pieces.

    >>> stops = StopStrings(["END"])
    >>> stops.push("one E"), stops.push("N two EN"), stops.push("D three")
    (('one ', None), ('EN two ', None), ('', 'END'))
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops, self._include = list(stops), include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is safe to emit, and the stop string that ended it (None before the end).

        Held back is exactly the longest suffix that is a proper prefix of a stop string. Of several stop strings, the
        one that is completed first ends the text; of those completed by the same character, the longest.
        """
        if not self._stops:
            return text, None
        text, self._held = self._held + text, ""
        # (end, start): completed first, then begun first.
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, start, stop = min(ends)
            return text[: end if self._include else start], stop
        held = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def finish(self) -> str:
        """Return what was held back, once no more text follows."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
