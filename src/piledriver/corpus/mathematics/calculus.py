"""Calculus: derivatives of polynomials, in one and several variables."""

from __future__ import annotations

from piledriver.corpus.mathematics.composition import Context
from piledriver.corpus.mathematics.dice import Dice
from piledriver.corpus.mathematics.polynomial import Polynomial
from piledriver.corpus.mathematics.wording import ORDINAL

Question = tuple[str, str]


def differentiate(dice: Dice, entropy: float, composed: bool = False) -> Question:
    """`Find the second derivative of 2*c**4 - 3*c wrt c.`"""
    context = Context(dice, depth=2 if composed else 0, entropy=entropy)
    order = dice.choice((1, 1, 2, 2, 3))
    if composed:
        return _of_named_function(dice, context, entropy, order)
    count = dice.choice((1, 1, 1, 2, 3))
    names = tuple(sorted(context.letter() for _ in range(count)))
    polynomial = _polynomial(dice, entropy, count, order)
    which = dice.below(count)
    result = polynomial
    for _ in range(order):
        result = result.derivative(which)
    return _asked(dice, polynomial.text(*names), names[which], order, count == 1), result.text(*names)


def _of_named_function(dice: Dice, context: Context, entropy: float, order: int) -> Question:
    """The derivative of a function that the sentences before tell."""
    polynomial = _polynomial(dice, entropy / 2, 1, order)
    function, variable = context.function(polynomial), context.letter()
    result = polynomial
    for _ in range(order):
        result = result.derivative()
    asked = _asked(dice, f"{function}({variable})", variable, order, False)
    return context.question(asked), result.text(variable)


def _asked(dice: Dice, what: str, variable: str, order: int, alone: bool) -> str:
    ordinal = ORDINAL[order]
    wanted = ["Find the {o} derivative of {e} wrt {v}.", "What is the {o} derivative of {e} wrt {v}?"]
    if alone:
        wanted += ["Find the {o} derivative of {e}.", "What is the {o} derivative of {e}?"]
    if order == 1:
        wanted += [
            "What is the derivative of {e} wrt {v}?",
            "Differentiate {e} wrt {v}.",
            "Differentiate {e} with respect to {v}.",
        ]
    return dice.choice(wanted).format(o=ordinal, e=what, v=variable)


def _polynomial(dice: Dice, entropy: float, variables: int, order: int) -> Polynomial:
    terms: dict[tuple[int, ...], int] = {}
    count = dice.between(2, 4)
    for share in dice.split(max(2.0, entropy), count):
        powers = tuple(dice.between(0, order + 2) for _ in range(variables))
        terms[powers] = dice.nonzero(max(0.7, share))
    lead = tuple(dice.between(order, order + 3) if i == 0 else dice.between(0, 2) for i in range(variables))
    terms[lead] = dice.nonzero(max(0.7, entropy / 4))
    return Polynomial(terms)
