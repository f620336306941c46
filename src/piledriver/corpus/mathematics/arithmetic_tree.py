"""Sums, products and quotients of integers that have a value chosen beforehand, printed as the original prints them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from piledriver.corpus.mathematics.dice import Dice
from piledriver.corpus.mathematics.wording import Number, decimal


@dataclass(frozen=True)
class Node:
    """A number, a name (`value` is what it stands for), or an operation of two nodes."""

    kind: str
    text: str = ""
    value: Fraction = Fraction(0)
    left: Node | None = None
    right: Node | None = None


def number(value: Number) -> Node:
    """A leaf."""
    return Node("number", decimal(value), Fraction(value))


def name(text: str, value: Number) -> Node:
    """A letter that stands for a number."""
    return Node("name", text, Fraction(value))


def operation(kind: str, left: Node, right: Node) -> Node:
    """`+`, `-`, `*` or `/` of two nodes, with its exact value."""
    a, b = left.value, right.value
    value = a + b if kind == "+" else a - b if kind == "-" else a * b if kind == "*" else a / b
    return Node(kind, "", value, left, right)


def printed(node: Node) -> str:
    """The expression with no more brackets than its meaning needs, negative numbers of quotients in brackets.

    >>> printed(operation("/", number(-2), operation("+", number(3), number(-4))))
    '(-2)/(3 + -4)'
    """
    if node.left is None or node.right is None:
        return node.text
    left, right = printed(node.left), printed(node.right)
    negative_left, negative_right = left.startswith("-"), right.startswith("-")
    if node.kind in "+-":
        if node.right.kind in "+-":
            right = f"({right})"
        return f"{left} {node.kind} {right}"
    if node.kind == "*":
        if node.left.kind in "+-":
            left = f"({left})"
        if node.right.kind in "+-*":
            right = f"({right})"
        return f"{left}*{right}"
    if node.left.kind in "+-*/" or negative_left:
        left = f"({left})"
    if node.right.kind in "+-*/" or negative_right:
        right = f"({right})"
    return f"{left}/{right}"


def expression_of(dice: Dice, value: Fraction, operations: int, kinds: str, size: int) -> Node:
    """A random expression with this value; `kinds` are the operations that it may use.

    No recursion that anybody outside could deepen: the number of operations is at most a few dozen.
    """
    if operations <= 0:
        return _leaf(dice, value, size)
    if operations == 1 and value.denominator != 1 and "/" in kinds:
        return _leaf(dice, value, size)
    kind = dice.choice(kinds)
    if kind in "*/" and value == 0 and dice.chance(0.7) and set(kinds) & set("+-"):
        kind = dice.choice([k for k in kinds if k in "+-"])
    rest = operations - 1
    first = dice.between(0, rest)
    if kind in "+-":
        other = _addend(dice, value, first, kinds, size)
        left, right = (value - other, other) if kind == "+" else (value + other, other)
    else:
        other = _factor(dice, size)
        if kind == "*":
            left, right = (value / other, other) if dice.chance() else (other, value / other)
        elif value != 0 and dice.chance():
            left, right = other, other / value
        else:
            left, right = value * other, other
    return operation(
        kind,
        expression_of(dice, left, rest - first, kinds, size),
        expression_of(dice, right, first, kinds, size),
    )


def _addend(dice: Dice, value: Fraction, operations: int, kinds: str, size: int) -> Fraction:
    if "/" in kinds and operations and dice.chance(0.6):
        return Fraction(dice.between(-size, size), dice.between(1, 12))
    whole = Fraction(dice.between(-size, size))
    # One of the two must be what the denominator leaves over.
    return whole if value.denominator == 1 or operations == 0 else whole + value - int(value)


def _factor(dice: Dice, size: int) -> Fraction:
    value = Fraction(dice.between(1, max(2, size)) * dice.sign())
    return value / dice.between(1, 12) if dice.chance(0.4) else value


def _leaf(dice: Dice, value: Fraction, size: int) -> Node:
    if value.denominator == 1:
        return number(value)
    by = dice.between(1, max(2, min(30, size))) * dice.sign()
    return operation("/", number(value.numerator * by), number(value.denominator * by))
