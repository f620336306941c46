"""Questions whose numbers are given by other questions: `Let y = -43918 + 73175. Is y a prime number?`"""

from __future__ import annotations

from fractions import Fraction

from piledriver.corpus.mathematics.arithmetic_tree import Node, expression_of, name, number, operation, printed
from piledriver.corpus.mathematics.dice import Dice
from piledriver.corpus.mathematics.equations import linear_equation, linear_pair
from piledriver.corpus.mathematics.polynomial import Polynomial
from piledriver.corpus.mathematics.wording import ORDINAL, VARIABLES, Number, decimal, shown, term, total


class Context:
    """The letters that are taken and the sentences that come before the question."""

    def __init__(self, dice: Dice, *, depth: int, entropy: float) -> None:
        self.dice = dice
        self.entropy = entropy
        self._depth = depth
        self._letters = dice.shuffled(VARIABLES)
        self.sentences: list[str] = []

    def letter(self) -> str:
        """A letter that nothing stands for yet."""
        return self._letters.pop()

    def question(self, asked: str) -> str:
        """The sentences so far and what is asked."""
        return " ".join([*self.sentences, asked])

    def hidden(self, value: Number) -> str:
        """A letter for a number, with the sentences that tell what it is."""
        return self._entity(Fraction(value), self._depth)

    def maybe_hidden(self, value: Number, probability: float) -> str:
        """The number itself or a letter for it."""
        if self._depth and len(self._letters) > 14 and self.dice.chance(probability):
            return self.hidden(value)
        return shown(value) if not isinstance(value, Fraction) or not _ends(value) else _either(self.dice, value)

    def function(self, polynomial: Polynomial) -> str:
        """A letter for a polynomial function, with the sentences that tell what it is.

        It is written down, or told as a derivative, or as a sum of multiples of two others.
        """
        dice = self.dice
        kind = dice.below(3) if self._depth and len(self._letters) > 8 else 0
        function, variable = self.letter(), self.letter()
        if kind == 0:
            self.sentences.append(f"Let {function}({variable}) = {polynomial.text(variable)}.")
        elif kind == 1:
            order = dice.between(1, 3)
            for _ in range(order):
                polynomial = polynomial.integral()
            lower = Polynomial.of([dice.between(-20, 20) for _ in range(order)])
            told = (polynomial + lower).text(variable)
            self.sentences.append(f"Let {function}({variable}) be the {ORDINAL[order]} derivative of {told}.")
        else:
            self._told_as_sum(function, variable, polynomial)
        self._letters.insert(0, variable)
        return function

    def _told_as_sum(self, function: str, variable: str, polynomial: Polynomial) -> None:
        """`Let j(f) = -2*i(f) - 28*o(f).`: with s a + t b = 1, a (s p + b u) + b (t p - a u) is p for any u."""
        dice = self.dice
        a, s, b, t = dice.choice(
            ((2, -1, 3, 1), (3, -1, 4, 1), (-2, 1, 3, 1), (5, 2, -3, 3), (1, 1, -2, 0), (-6, 1, 7, 1))
        )
        free = Polynomial.of([dice.between(-9, 9) for _ in range(polynomial.degree + 1)])
        parts = ((a, polynomial.times(s) + free.times(b)), (b, polynomial.times(t) - free.times(a)))
        calls = []
        for by, part in parts:
            name_of_part, inner = self.letter(), self.letter()
            self.sentences.append(f"Let {name_of_part}({inner}) = {part.text(inner)}.")
            calls.append(term(by, f"{name_of_part}({variable})"))
            self._letters.insert(0, inner)
        self.sentences.append(f"Let {function}({variable}) = {total(calls)}.")

    def _entity(self, value: Fraction, depth: int) -> str:
        dice = self.dice
        if len(self._letters) < 10:
            depth = 0
        kinds = ["sum", "arithmetic"]
        if value.denominator == 1:
            kinds += ["linear", "pair", "polynomial"]
        kind = dice.choice(kinds)
        size = int(10 ** max(1.0, min(4.0, self.entropy / 3)))
        if kind == "linear":
            letter = self.letter()
            given = self._given(dice.between(2, 9), depth)
            equation = linear_equation(dice, letter, int(value), size, terms=dice.between(2, 4), named=given)
            self.sentences.append(f"Suppose {equation}.")
            return letter
        if kind == "pair":
            first, second = self.letter(), self.letter()
            equations = linear_pair(dice, (first, second), (int(value), dice.between(-5, 5)), 5)
            self.sentences.append(f"Suppose {equations}.")
            return first
        if kind == "polynomial":
            return self._evaluated(int(value), depth)
        letter = self.letter()
        if kind == "sum":
            known = self._given(dice.between(-size, size), depth)
            left = known if known is not None else number(Fraction(dice.between(-size, size)))
            right = value - left.value
            if right.denominator != 1 and not _ends(right):
                shift = Fraction(dice.between(-size, size), value.denominator)
                left, right = (
                    (_quotient(left.value + shift), value - left.value - shift) if known is None else (left, right)
                )
            other = number(right) if _ends(right) else _quotient(right)
            pair = (left, other) if dice.chance() else (other, left)
            # `a - b` is `a + -b` with the second number turned round.
            if dice.chance() and pair[1].kind == "number":
                node = operation("-", pair[0], number(-pair[1].value))
            else:
                node = operation("+", *pair)
            self.sentences.append(f"Let {letter} = {printed(node)}.")
            return letter
        node = expression_of(dice, value, dice.between(2, 4), "+-*/", max(6, size // 20))
        self.sentences.append(f"Let {letter} be {printed(node)}.")
        return letter

    def _evaluated(self, value: int, depth: int) -> str:
        dice = self.dice
        function, variable = self.letter(), self.letter()
        point = dice.between(-12, 12)
        degree = dice.between(1, 3)
        higher = [0, *(dice.between(-12, 12) for _ in range(degree))]
        higher[-1] = higher[-1] or 1
        rest = value - int(Polynomial.of(higher).at(point))
        polynomial = Polynomial.of([rest, *higher[1:]])
        self.sentences.append(f"Let {function}({variable}) = {polynomial.text(variable)}.")
        given = self._given(point, depth)
        letter = self.letter()
        self.sentences.append(f"Let {letter} be {function}({printed(given) if given is not None else point}).")
        return letter

    def _given(self, value: int, depth: int) -> Node | None:
        """A number inside a sentence, which may itself be told by a sentence before."""
        if depth <= 1 or len(self._letters) < 12 or not self.dice.chance(0.6):
            return None
        return name(self._entity(Fraction(value), depth - 1), value)


def _ends(value: Fraction) -> bool:
    """Whether a number is written with few decimal places."""
    return 10**6 % value.denominator == 0


def _either(dice: Dice, value: Fraction) -> str:
    return decimal(value) if dice.chance() else shown(value)


def _quotient(value: Fraction) -> Node:
    if value.denominator == 1:
        return number(value)
    return Node("name", shown(value), value)
