"""Random choices for one question, from 64 bits of a core stream: a question is a pure function of its number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from math import gcd
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """Draws one number after the other, always the same ones from the same start.

    The start comes from a core stream; what follows comes from the standard library's twister, whose raw bits are the
    same on every platform and version, and which draws a hundred small numbers in the time of one block of a stream.

    >>> Dice(7).between(1, 6) == Dice(7).between(1, 6)
    True
    """

    __slots__ = ("bits64",)

    def __init__(self, start: int) -> None:
        self.bits64 = random.Random(start).getrandbits

    def bits(self) -> int:
        """64 random bits."""
        return self.bits64(64)

    def below(self, bound: int) -> int:
        """An integer from 0 to below the bound."""
        if bound.bit_length() <= 40:
            return (self.bits() * bound) >> 64
        words = bound.bit_length() // 64 + 2
        value = 0
        for _ in range(words):
            value = (value << 64) | self.bits()
        return (value * bound) >> (64 * words)

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + self.below(high - low + 1)

    def real(self, low: float, high: float) -> float:
        """A number from low to high."""
        return low + (high - low) * (self.bits() >> 11) * 2.0**-53

    def chance(self, probability: float = 0.5) -> bool:
        """True as often as asked."""
        return self.real(0.0, 1.0) < probability

    def choice(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """All the items in random order."""
        left = list(items)
        for i in range(len(left) - 1, 0, -1):
            j = self.below(i + 1)
            left[i], left[j] = left[j], left[i]
        return left

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Some of the items, none twice."""
        return self.shuffled(items)[:count]

    def sign(self) -> int:
        """1 or -1."""
        return 1 if self.below(2) else -1

    def integer(self, entropy: float, *, signed: bool = True, least: int = 0) -> int:
        """An integer of up to `entropy` decimal digits' worth of choice; at least `least` away from 0."""
        bound = max(least, int(10**entropy / (2 if signed else 1)))
        value = self.between(least, max(bound, least + 1))
        return value * self.sign() if signed else value

    def nonzero(self, entropy: float, *, signed: bool = True) -> int:
        """An integer that is not 0."""
        return self.integer(entropy, signed=signed, least=1)

    def fraction(self, entropy: float) -> Fraction:
        """A rational that is not an integer."""
        for _ in range(100):
            denominator = self.between(2, max(3, min(10**6, int(10 ** (entropy / 2)))))
            numerator = self.integer(entropy / 2 + 0.5, least=1)
            if gcd(numerator, denominator) < denominator:
                return Fraction(numerator, denominator)
        return Fraction(1, 2)

    def split(self, entropy: float, parts: int) -> list[float]:
        """The entropy divided at random between several numbers."""
        cuts = sorted(self.real(0.0, 1.0) for _ in range(parts - 1))
        ends = [0.0, *cuts, 1.0]
        return [entropy * (ends[i + 1] - ends[i]) for i in range(parts)]
