"""Comparison: pairs, the k-th biggest, the closest, and sorting, of integers, fractions and decimals."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from piledriver.corpus.mathematics.composition import Context
from piledriver.corpus.mathematics.dice import Dice
from piledriver.corpus.mathematics.wording import ORDINAL, decimal, listed, shown

Question = tuple[str, str]
Shown = tuple[Fraction, str]

_TRUE_OR_FALSE: tuple[tuple[str, Callable[[Fraction, Fraction], bool]], ...] = (
    ("Is {a} less than {b}?", lambda a, b: a < b),
    ("Is {a} < {b}?", lambda a, b: a < b),
    ("Is {a} greater than {b}?", lambda a, b: a > b),
    ("Is {a} > {b}?", lambda a, b: a > b),
    ("Is {a} less than or equal to {b}?", lambda a, b: a <= b),
    ("Is {a} <= {b}?", lambda a, b: a <= b),
    ("Is {a} at most as big as {b}?", lambda a, b: a <= b),
    ("Is {a} smaller than {b}?", lambda a, b: a < b),
    ("Is {a} bigger than {b}?", lambda a, b: a > b),
    ("Is {a} at least as big as {b}?", lambda a, b: a >= b),
    ("Is {a} != {b}?", lambda a, b: a != b),
    ("Is {a} at most {b}?", lambda a, b: a <= b),
    ("Is {a} greater than or equal to {b}?", lambda a, b: a >= b),
    ("Is {a} >= {b}?", lambda a, b: a >= b),
    ("Is {a} at least {b}?", lambda a, b: a >= b),
    ("Is {a} equal to {b}?", lambda a, b: a == b),
    ("Does {a} = {b}?", lambda a, b: a == b),
    ("Do {a} and {b} have the same value?", lambda a, b: a == b),
    ("Are {a} and {b} equal?", lambda a, b: a == b),
    ("Is {a} not equal to {b}?", lambda a, b: a != b),
    ("Are {a} and {b} unequal?", lambda a, b: a != b),
    ("Are {a} and {b} nonequal?", lambda a, b: a != b),
    ("Do {a} and {b} have different values?", lambda a, b: a != b),
)


def pair(dice: Dice, entropy: float, composed: bool = False) -> Question:
    """`Which is bigger: 4/7 or 87/71?` or `Is -1/3 less than 4?`"""
    context = Context(dice, depth=2 if composed else 0, entropy=entropy)
    (a, a_text), (b, b_text) = _values(dice, entropy, 2, context, composed, distinct=False)
    if a != b and dice.chance(0.3):
        word, bigger = dice.choice((("bigger", True), ("greater", True), ("smaller", False)))
        answer = a_text if (a > b) == bigger else b_text
        return context.question(f"Which is {word}: {a_text} or {b_text}?"), answer
    asked, holds = dice.choice(_TRUE_OR_FALSE)
    return context.question(asked.format(a=a_text, b=b_text)), str(holds(a, b))


def kth_biggest(dice: Dice, entropy: float, composed: bool = False, more: bool = False) -> Question:
    """`What is the third biggest value in 17, 0.1, 9, 3/4?`"""
    context = Context(dice, depth=2 if composed else 0, entropy=entropy)
    values = _values(dice, entropy, dice.between(5, 9) if more else dice.between(3, 5), context, composed)
    place = dice.between(1, len(values))
    word = dice.choice(("biggest", "smallest"))
    wanted = sorted(values, reverse=word == "biggest")[place - 1]
    rank = word if place == 1 else f"{ORDINAL[place]} {word}"
    return _choose(dice, context, f"is the {rank} value", values, wanted)


def closest(dice: Dice, entropy: float, composed: bool = False, more: bool = False) -> Question:
    """`What is the nearest to -1 in 0, -3/2, 5?`"""
    context = Context(dice, depth=2 if composed else 0, entropy=entropy)
    while True:
        values = _values(dice, entropy, dice.between(5, 8) if more else dice.between(3, 4), context, composed)
        target, target_text = _values(dice, entropy / 2, 1, context, composed and dice.chance(0.3))[0]
        by_distance = sorted(values, key=lambda value: abs(value[0] - target))
        if abs(by_distance[0][0] - target) != abs(by_distance[1][0] - target):
            break
        context = Context(dice, depth=2 if composed else 0, entropy=entropy)
    word = dice.choice(("closest", "nearest"))
    return _choose(dice, context, f"is the {word} to {target_text}", values, by_distance[0])


def sort(dice: Dice, entropy: float, composed: bool = False, more: bool = False) -> Question:
    """`Put -3, 0, 7.6, 4 in decreasing order.`"""
    context = Context(dice, depth=2 if composed else 0, entropy=entropy)
    values = _values(
        dice, entropy, dice.between(5, 9) if more else dice.between(3, 4 + int(entropy / 3)), context, composed
    )
    order = dice.choice(("ascending", "increasing", "descending", "decreasing", ""))
    verb = dice.choice(("Sort", "Put")) if order else "Sort"
    result = sorted(values, reverse=order in ("descending", "decreasing"))
    asked = f"{verb} {listed(text for _, text in values)}" + (f" in {order} order." if order else ".")
    return context.question(asked), listed(text for _, text in result)


def _choose(dice: Dice, context: Context, what: str, values: list[Shown], wanted: Shown) -> Question:
    if dice.chance():
        return context.question(f"What {what} in {listed(text for _, text in values)}?"), wanted[1]
    options = "  ".join(f"({'abcdefghijklm'[i]}) {text}" for i, (_, text) in enumerate(values))
    return context.question(f"Which {what}?  {options}"), "abcdefghijklm"[values.index(wanted)]


def _values(
    dice: Dice, entropy: float, count: int, context: Context, composed: bool, *, distinct: bool = True
) -> list[Shown]:
    found: list[Shown] = []
    hidden = dice.below(count) if composed else -1
    shares = dice.split(entropy, count)
    while len(found) < count:
        value, text = _value(dice, max(0.6, shares[len(found)]))
        if distinct and any(value == other for other, _ in found):
            continue
        if not distinct and found and dice.chance(0.2):
            value, text = found[0][0], found[0][1]
        if len(found) == hidden:
            text = context.hidden(value)
        found.append((value, text))
    return found


def _value(dice: Dice, entropy: float) -> Shown:
    kind = dice.below(3)
    if kind == 0:
        value = dice.fraction(min(entropy, 4.0))
        return value, shown(value)
    if kind == 1:
        value = Fraction(dice.nonzero(entropy), 10 ** dice.between(1, 2))
        return value, decimal(value)
    value = Fraction(dice.integer(entropy))
    return value, shown(value)
