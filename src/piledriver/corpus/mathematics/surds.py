"""Expressions of square roots, with their exact value as sums of roots of square-free integers."""

from __future__ import annotations

from fractions import Fraction

from piledriver.corpus.mathematics.dice import Dice
from piledriver.corpus.mathematics.wording import term

Surd = dict[int, Fraction]
_RADICANDS = (2, 3, 5, 6, 7, 10, 11, 13, 17, 19)


def surd_question(dice: Dice, entropy: float) -> tuple[str, str]:
    """An expression with square roots and what it comes to."""
    radicand = dice.choice(_RADICANDS)
    width = 2 + min(4, int(entropy / 2.5))
    if dice.chance():
        text, value = _polynomial(dice, radicand, width)
    else:
        text, value = _quotient(dice, radicand, width)
    if dice.chance(0.35):
        text, value = f"({text})**2", _times(value, value)
    if dice.chance(0.3):
        by = dice.between(-6, 6)
        text, value = f"({text})*{by}" if not text.endswith("**2") else f"{text}*{by}", _scaled(value, Fraction(by))
    if dice.chance(0.3):
        plus = dice.between(-5, 5)
        text, value = (f"{text} + {plus}" if dice.chance() else f"{plus} + {text}"), _plus(value, {1: Fraction(plus)})
    return text, surd_text(value)


def surd_text(value: Surd) -> str:
    """As sympy prints it: the root first where both parts are positive, else the number first.

    >>> surd_text({1: Fraction(5100), 7: Fraction(-150)}), surd_text({19: Fraction(1, 4)})
    ('5100 - 150*sqrt(7)', 'sqrt(19)/4')
    """
    kept = {root: part for root, part in sorted(value.items()) if part}
    if not kept:
        return "0"
    constant = kept.pop(1, Fraction(0))
    roots = [term(part, f"sqrt({root})") for root, part in kept.items()]
    if not constant:
        parts = roots
    elif constant > 0 and all(part > 0 for part in kept.values()):
        parts = [*roots, str(constant)]
    else:
        parts = [str(constant), *roots]
    text = parts[0]
    for part in parts[1:]:
        text += f" - {part[1:]}" if part.startswith("-") else f" + {part}"
    return text


def _polynomial(dice: Dice, radicand: int, width: int) -> tuple[str, Surd]:
    """A sum of integers and multiples of one root, some of it in brackets."""
    square = dice.between(1, 12)
    root, value = f"sqrt({square * square * radicand})", {radicand: Fraction(square)}
    text, total = _sum(dice, root, value, width, integers=True)
    if dice.chance():
        more, other = _sum(dice, root, value, max(2, width - 1), integers=True)
        by = dice.between(-6, 6)
        if dice.chance():
            return f"{text} + {by}*({more})", _plus(total, _scaled(other, Fraction(by)))
        return f"{text} - ({more})", _plus(total, _scaled(other, Fraction(-1)))
    return text, total


def _quotient(dice: Dice, radicand: int, width: int) -> tuple[str, Surd]:
    """Multiples of one root divided by multiples of another; the answer is a multiple of a root."""
    below = dice.choice([r for r in _RADICANDS if r != radicand])
    top_square, bottom_square = dice.between(1, 6), dice.between(1, 6)
    product = _square_free(radicand * below)
    top = f"sqrt({radicand * below * top_square**2})"
    top_value = {product[1]: Fraction(top_square * product[0])}
    bottom, bottom_value = f"sqrt({below * bottom_square**2})", {below: Fraction(bottom_square)}
    while True:
        text, value = _sum(dice, top, top_value, width, integers=False)
        divisor, by = _sum(dice, bottom, bottom_value, max(1, width - 1), integers=False)
        if by.get(below):
            break
    text = f"({text})" if " " in text or "*" in text else text
    divisor = f"({divisor})" if " " in divisor or "*" in divisor else divisor
    # 1 / (k sqrt(b)) is sqrt(b) / (k b).
    return f"{text}/{divisor}", _times(value, {below: 1 / (by[below] * below)})


def _sum(dice: Dice, root: str, value: Surd, width: int, *, integers: bool) -> tuple[str, Surd]:
    text, total = "", Surd()
    for _ in range(max(1, dice.between(max(1, width - 1), width))):
        by = dice.between(-6, 6)
        form = dice.below(4)
        if integers and dice.chance(0.3):
            part, amount = str(by), {1: Fraction(by)}
        elif form == 0:
            part, amount = f"{root}*{by}", _scaled(value, Fraction(by))
        elif form == 1:
            part, amount = f"{by}*{root}", _scaled(value, Fraction(by))
        else:
            part, amount = root, value
        if not text:
            text, total = part, amount
        elif dice.chance():
            text, total = f"{text} + {part}", _plus(total, amount)
        else:
            text, total = f"{text} - {part}", _plus(total, _scaled(amount, Fraction(-1)))
    return text, total


def _plus(a: Surd, b: Surd) -> Surd:
    return {root: a.get(root, Fraction(0)) + b.get(root, Fraction(0)) for root in {*a, *b}}


def _scaled(a: Surd, by: Fraction) -> Surd:
    return {root: part * by for root, part in a.items()}


def _times(a: Surd, b: Surd) -> Surd:
    product = Surd()
    for root, part in a.items():
        for other, amount in b.items():
            outside, inside = _square_free(root * other)
            product[inside] = product.get(inside, Fraction(0)) + part * amount * outside
    return product


def _square_free(number: int) -> tuple[int, int]:
    """(a, b) with number = a^2 b and b square-free."""
    outside, divisor = 1, 2
    while divisor * divisor <= number:
        while number % (divisor * divisor) == 0:
            number //= divisor * divisor
            outside *= divisor
        divisor += 1
    return outside, number
