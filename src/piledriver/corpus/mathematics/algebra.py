"""Algebra: linear equations, roots and factors of polynomials, sequences."""

from __future__ import annotations

from fractions import Fraction

from piledriver.corpus.mathematics.arithmetic_tree import name
from piledriver.corpus.mathematics.composition import Context
from piledriver.corpus.mathematics.dice import Dice
from piledriver.corpus.mathematics.equations import linear_equation, linear_pair
from piledriver.corpus.mathematics.polynomial import Polynomial, factored, from_roots
from piledriver.corpus.mathematics.wording import VARIABLES, listed, shown

Question = tuple[str, str]

_ROOT_QUESTIONS = (
    "Let {equation}. What is {variable}?",
    "Let {equation}. Calculate {variable}.",
    "Suppose {equation}. What is {variable}?",
    "Suppose {equation}. Calculate {variable}.",
    "What is {variable} in {equation}?",
    "Solve {equation} for {variable}.",
    "Find {variable} such that {equation}.",
    "Find {variable}, given that {equation}.",
    "Determine {variable} so that {equation}.",
    "Determine {variable}, given that {equation}.",
    "Solve {equation}.",
)


def linear_1d(dice: Dice, entropy: float, composed: bool = False) -> Question:
    """`Solve 126*r = 110*r + 80 for r.`"""
    context = Context(dice, depth=2 if composed else 0, entropy=entropy)
    variable = context.letter()
    solution = dice.integer(min(entropy / 4, 2.0))
    size = int(10 ** max(1.0, entropy / 3))
    named = None
    if composed:
        value = dice.between(2, 30)
        named = name(context.hidden(value), value)
    equation = linear_equation(dice, variable, solution, size, terms=dice.between(2, 4), named=named)
    return context.question(f"Solve {equation} for {variable}."), shown(solution)


def linear_2d(dice: Dice, entropy: float, composed: bool = False) -> Question:
    """`Solve 2*i + 3*w + 5 = -5, -2*w = 4*i + 4 for i.`"""
    context = Context(dice, depth=2 if composed else 0, entropy=entropy)
    first, second = context.letter(), context.letter()
    solution = (dice.between(-5, 5) if entropy < 8 else dice.between(-30, 30), dice.between(-5, 5))
    size = int(10 ** max(0.8, min(2.0, entropy / 6)))
    equations = linear_pair(dice, (first, second), solution, size)
    if composed:
        # A constant of one of the equations is told by a sentence before.
        shift = dice.between(2, 30)
        letter = context.hidden(shift)
        left, _, right = equations.partition(" = ")
        equations = (
            f"{left} + {letter} = {shift} + {right}"
            if not right.startswith("-")
            else f"{left} + {letter} = {shift} - {right[1:]}"
        )
    return context.question(f"Solve {equations} for {first}."), shown(solution[0])


def polynomial_roots(dice: Dice, entropy: float, composed: bool = False) -> Question:
    """`Suppose 2*x**2 - 4*x = 0. What is x?` or `Factor 2*x**2 - 4*x.`"""
    context = Context(dice, depth=2 if composed else 0, entropy=entropy)
    variable = context.letter()
    roots = _roots(dice, entropy)
    scale = Fraction(dice.between(1, 5) * dice.sign(), dice.choice((1, 1, 1, 2, 3, 4, 5, 6, 7, 9, 11)))
    for root in roots:
        scale *= root.denominator
    polynomial = from_roots(roots, scale)
    what = polynomial.text(variable)
    if composed:
        what = f"{context.function(polynomial)}({variable})"
    if dice.chance(0.35):
        return context.question(f"Factor {what}."), factored(roots, scale, variable)
    asked = dice.choice(_ROOT_QUESTIONS[2:-1] if composed else _ROOT_QUESTIONS)
    asked = asked.format(equation=f"{what} = 0", variable=variable)
    return context.question(asked), listed(shown(root) for root in sorted(set(roots)))


def _roots(dice: Dice, entropy: float) -> list[Fraction]:
    count = dice.choice((2, 2, 2, 3, 3, 4, 5))
    shares = dice.split(max(1.0, entropy), count)
    roots = []
    for share in shares:
        value = Fraction(dice.integer(max(0.5, share)))
        if dice.chance(0.15):
            value /= dice.between(2, 9)
        roots.append(value)
    if dice.chance(0.25):
        roots[-1] = roots[0]
    return roots


def sequence_next_term(dice: Dice, entropy: float) -> Question:
    """`What is next in 2, 5, 8, 11?`"""
    polynomial = _sequence(dice, entropy)
    count = polynomial.degree + dice.between(2, 5)
    terms = listed(shown(polynomial.at(n)) for n in range(1, count + 1))
    asked = dice.choice(("What is next in {}?", "What comes next: {}?", "What is the next term in {}?"))
    return asked.format(terms), shown(polynomial.at(count + 1))


def sequence_nth_term(dice: Dice, entropy: float) -> Question:
    """`What is the n'th term of 2, 5, 8, 11?`"""
    polynomial = _sequence(dice, entropy)
    variable = dice.choice(VARIABLES)
    count = polynomial.degree + dice.between(2, 5)
    terms = listed(shown(polynomial.at(n)) for n in range(1, count + 1))
    return f"What is the {variable}'th term of {terms}?", polynomial.text(variable)


def _sequence(dice: Dice, entropy: float) -> Polynomial:
    degree = dice.between(1, 3)
    shares = dice.split(entropy, degree + 1)
    coefficients = [dice.integer(max(0.7, share)) for share in shares]
    coefficients[-1] = coefficients[-1] or 1
    return Polynomial.of(coefficients)
