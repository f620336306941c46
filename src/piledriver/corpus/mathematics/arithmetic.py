"""Arithmetic: sums, products, quotients, other bases, roots to the nearest integer, surds."""

from __future__ import annotations

from fractions import Fraction
from math import isqrt

from piledriver.corpus.mathematics.arithmetic_tree import expression_of, printed
from piledriver.corpus.mathematics.dice import Dice
from piledriver.corpus.mathematics.surds import surd_question
from piledriver.corpus.mathematics.wording import ORDINAL, decimal, in_base, shown

Question = tuple[str, str]

_ADD = (
    "{p} + {q}", "{p}+{q}", "Work out {p} + {q}.", "Add {p} and {q}.", "Put together {p} and {q}.", "Sum {p} and {q}.",
    "Total of {p} and {q}.", "Add together {p} and {q}.", "What is {p} plus {q}?", "Calculate {p} + {q}.",
    "What is {p} + {q}?",
)  # fmt: skip
_SUBTRACT = (
    "{p} - {q}", "Work out {p} - {q}.", "What is {p} minus {q}?", "What is {p} take away {q}?",
    "What is {q} less than {p}?", "Subtract {q} from {p}.", "Calculate {p} - {q}.", "What is {p} - {q}?",
)  # fmt: skip
_DISTANCE = ("What is the distance between {p} and {q}?", "What is the difference between {p} and {q}?")
_MULTIPLY = (
    "{p}*{q}", "{p} * {q}", "Calculate {p}*{q}.", "Work out {p} * {q}.", "Multiply {p} and {q}.",
    "Product of {p} and {q}.", "What is the product of {p} and {q}?", "{p} times {q}", "What is {p} times {q}?",
    "Multiply {p} by {q}.",
)  # fmt: skip
_DIVIDE = ("Divide {p} by {q}.", "{p} divided by {q}", "What is {p} divided by {q}?", "Calculate {p} divided by {q}.")
_EVALUATE = ("{}", "What is {}?", "Evaluate {}.", "Calculate {}.", "What is the value of {}?")
_ROOTS = {2: "square root", 3: "cube root"}


def add_or_sub(dice: Dice, entropy: float) -> Question:
    """Two integers or decimals, added or subtracted in many words."""
    p, q = _pair(dice, entropy)
    if dice.chance():
        return dice.choice(_ADD).format(p=decimal(p), q=decimal(q)), decimal(p + q)
    if dice.chance(0.2):
        return dice.choice(_DISTANCE).format(p=decimal(p), q=decimal(q)), decimal(abs(p - q))
    return dice.choice(_SUBTRACT).format(p=decimal(p), q=decimal(q)), decimal(p - q)


def add_or_sub_in_base(dice: Dice, entropy: float) -> Question:
    """`In base 5, what is -3112 - -142?`"""
    base = dice.between(2, 16)
    first, second = dice.split(entropy, 2)
    p, q = dice.integer(max(1.0, first)), dice.integer(max(0.5, second))
    sign, result = ("+", p + q) if dice.chance() else ("-", p - q)
    return f"In base {base}, what is {in_base(p, base)} {sign} {in_base(q, base)}?", in_base(result, base)


def mul(dice: Dice, entropy: float) -> Question:
    """Two integers or decimals multiplied."""
    p, q = _pair(dice, entropy)
    return dice.choice(_MULTIPLY).format(p=decimal(p), q=decimal(q)), decimal(p * q)


def div(dice: Dice, entropy: float) -> Question:
    """Two integers divided; half of the time without remainder."""
    first, second = dice.split(entropy, 2)
    q = dice.nonzero(max(0.5, second))
    p = q * dice.integer(max(0.5, first)) if dice.chance() else dice.integer(max(1.0, first + second / 2))
    return dice.choice(_DIVIDE).format(p=p, q=q), shown(Fraction(p, q))


def add_sub_multiple(dice: Dice, entropy: float, longer: bool = False) -> Question:
    """Several integers with plus, minus and brackets."""
    return _evaluated(dice, entropy, "+-", Fraction(dice.integer(max(0.8, entropy / 5))), longer)


def mul_div_multiple(dice: Dice, entropy: float, longer: bool = False) -> Question:
    """Several integers with times, divided by and brackets."""
    return _evaluated(dice, entropy, "*/", _small(dice), longer)


def mixed(dice: Dice, entropy: float, longer: bool = False) -> Question:
    """Several integers with all four operations."""
    return _evaluated(dice, entropy, "+-*/", _small(dice), longer)


def nearest_integer_root(dice: Dice, entropy: float) -> Question:
    """`What is the cube root of 7832 to the nearest integer?`"""
    number = dice.nonzero(entropy, signed=False)
    degree = dice.choice((2, 2, 3, 4, 5, 6, 7, 8, 9, 10))
    nearest = _nearest_root(number, degree)
    if dice.chance():
        root = _ROOTS[degree] if degree in _ROOTS and dice.chance() else f"{ORDINAL[degree]} root"
        return f"What is the {root} of {number} to the nearest integer?", shown(nearest)
    return f"What is {number} to the power of 1/{degree}, to the nearest integer?", shown(nearest)


def simplify_surd(dice: Dice, entropy: float) -> Question:
    """`Simplify (sqrt(76) - 2*sqrt(19))**2.`"""
    expression, answer = surd_question(dice, entropy)
    return f"Simplify {expression}.", answer


def _pair(dice: Dice, entropy: float) -> tuple[Fraction, Fraction]:
    first, second = dice.split(entropy, 2)
    return _integer_or_decimal(dice, max(0.5, first)), _integer_or_decimal(dice, max(0.5, second))


def _integer_or_decimal(dice: Dice, entropy: float) -> Fraction:
    value = dice.integer(entropy)
    places = dice.between(1, max(1, int(entropy) + 1)) if dice.chance() else 0
    return Fraction(value, 10**places)


def _small(dice: Dice) -> Fraction:
    value = Fraction(dice.between(-40, 40))
    return value / dice.between(2, 12) if dice.chance(0.4) else value


def _evaluated(dice: Dice, entropy: float, kinds: str, value: Fraction, longer: bool) -> Question:
    operations = dice.between(5, 10) if longer else dice.between(2, 5)
    size = int(min(10**5, 10 ** max(0.9, entropy / (4 if kinds == "+-" else 6))))
    node = expression_of(dice, value, operations, kinds, size)
    return dice.choice(_EVALUATE).format(printed(node)), shown(node.value)


def _nearest_root(number: int, degree: int) -> int:
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    if degree == 2:
        low = high = isqrt(number)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= number else (low, middle - 1)
    # Nearer to the next one, without a float: (2 r + 1)^n against 2^n times the number.
    return low + 1 if (2 * low + 1) ** degree < (number << degree) else low
