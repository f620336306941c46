"""Stop strings in pieces of text, against an oracle that looks at every character."""

from __future__ import annotations

import numpy as np
import pytest

from piledriver.core.random import Stream
from piledriver.serve.text.stop_strings import StopStrings


def oracle(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The first end of any stop string; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("seed", range(10))
def test_stop_strings_equal_the_oracle(seed: int) -> None:
    bits = iter(Stream(seed, "stops").bits(np.arange(1_000_000)).tolist())

    def below(bound: int) -> int:
        return int(next(bits) % bound)

    for _ in range(10_000):
        text = "".join("ab"[below(2)] for _ in range(below(12)))
        stops = list({"".join("ab"[below(2)] for _ in range(1 + below(4))) for _ in range(1 + below(3))})
        include = below(2) == 0
        machine, emitted, stopped, at = StopStrings(stops, include=include), "", None, 0
        while at < len(text) and stopped is None:
            size = 1 + below(3)
            piece, stopped = machine.push(text[at : at + size])
            emitted += piece
            expected = oracle(text[: at + size], stops, include=include)[0]
            assert expected.startswith(emitted)  # nothing of a stop string, nor after it, was shown
            at += size
        if stopped is None:
            emitted += machine.finish()
        assert (emitted, stopped) == oracle(text, stops, include=include)
