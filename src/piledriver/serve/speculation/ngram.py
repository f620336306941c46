"""N-gram speculation: what followed the last tokens before (Saxena, prompt lookup decoding, 2023)."""

from __future__ import annotations

from piledriver.serve.scheduling.sequence import Sequence
from piledriver.serve.speculation.speculator import AcceptanceRate


class NgramSpeculator:
    """Looks up the last `size` tokens of a sequence in an index of its own n-grams."""

    def __init__(self, size: int = 3) -> None:
        self._size = size
        self._indices: dict[int, tuple[dict[tuple[int, ...], int], int]] = {}
        self._rates: dict[int, AcceptanceRate] = {}

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """See `Speculator`."""
        tokens, size = sequence.tokens, self._size
        index, done = self._indices.get(sequence.number, ({}, size))
        # The n-gram that ends now is indexed next time: here it would find itself.
        for end in range(done, len(tokens)):
            index[tuple(tokens[end - size : end])] = end
        self._indices[sequence.number] = index, max(done, len(tokens))
        if not self._rates.setdefault(sequence.number, AcceptanceRate()).pays():
            return []
        start = index.get(tuple(tokens[-size:]))
        if start is None or start >= len(tokens):
            return []
        guessed: list[int] = []
        while len(guessed) < count:  # a guess that reaches the end continues with itself: a loop
            guessed.append(tokens[start] if start < len(tokens) else guessed[start - len(tokens)])
            start += 1
        return guessed

    def observe(self, sequence: Sequence, *, proposed: int, accepted: int) -> None:
        """See `Speculator`."""
        self._rates[sequence.number].observe(proposed, accepted)

    def forget(self, sequence: Sequence) -> None:
        """See `Speculator`."""
        self._indices.pop(sequence.number, None)
        self._rates.pop(sequence.number, None)
