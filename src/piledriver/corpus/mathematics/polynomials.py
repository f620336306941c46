"""Polynomials: adding, collecting, composing, evaluating, expanding, naming coefficients, powers."""

from __future__ import annotations

from fractions import Fraction

from piledriver.corpus.mathematics.composition import Context
from piledriver.corpus.mathematics.dice import Dice
from piledriver.corpus.mathematics.polynomial import Polynomial
from piledriver.corpus.mathematics.wording import Number, shown, term, total

Question = tuple[str, str]
_FORMS = (
    "Express {e} as {f} and give {n}.",
    "Rearrange {e} to {f} and give {n}.",
    "Express {e} in the form {f} and give {n}.",
    "Rearrange {e} to the form {f} and give {n}.",
)
_VERBS = ("What is {}?", "Determine {}.", "Give {}.", "Calculate {}.")


def add(dice: Dice, entropy: float) -> Question:
    """`Let f(x) = x + 1. Let g(u) = 2*u. Calculate 3*f(z) - g(z).`"""
    context = Context(dice, depth=1, entropy=entropy)
    variable = context.letter()
    pieces, result = [], Polynomial({})
    for share in dice.split(entropy, 2):
        polynomial = _polynomial(dice, share, dice.between(1, 3))
        by = dice.between(1, 9) * dice.sign()
        pieces.append(term(by, f"{context.function(polynomial)}({variable})"))
        result = result + polynomial.times(by)
    return context.question(dice.choice(_VERBS).format(total(pieces))), result.text(variable)


def coefficient_named(dice: Dice, entropy: float) -> Question:
    """`Express 2 - 3*x**2 + x in the form a*x**2 + b*x + c and give a.`"""
    context = Context(dice, depth=0, entropy=entropy)
    variable = context.letter()
    degree = dice.between(1, 4)
    polynomial = _polynomial(dice, entropy, degree)
    names = [context.letter() for _ in range(degree + 1)]
    powers = dice.shuffled(range(degree + 1))
    form = total(term(1, _times(name, _power(variable, power))) for name, power in zip(names, powers, strict=True))
    wanted = dice.below(degree + 1)
    value = polynomial.coefficient(powers[wanted])
    asked = dice.choice(_FORMS)
    return asked.format(e=_scattered(dice, polynomial, variable), f=form, n=names[wanted]), shown(value)


def collect(dice: Dice, entropy: float) -> Question:
    """`Collect the terms in 3*x - 7 + 2*x.`"""
    context = Context(dice, depth=0, entropy=entropy)
    variable = context.letter()
    polynomial = _polynomial(dice, entropy, dice.between(1, 3))
    return f"Collect the terms in {_scattered(dice, polynomial, variable)}.", polynomial.text(variable)


def compose(dice: Dice, entropy: float) -> Question:
    """`Let v(i) = i + 2. Let c(d) = 3*d. Give c(v(p)).`"""
    context = Context(dice, depth=1, entropy=entropy)
    variable = context.letter()
    f, g = (_polynomial(dice, share, dice.between(1, 2)) for share in dice.split(entropy, 2))
    outer, inner = context.function(f), context.function(g)
    asked = dice.choice(_VERBS).format(f"{outer}({inner}({variable}))")
    return context.question(asked), f.compose(g).text(variable)


def evaluate(dice: Dice, entropy: float, composed: bool = False) -> Question:
    """`Let y(a) = 10*a**2 + 179*a + 87. What is y(-16)?`"""
    context = Context(dice, depth=2 if composed else 0, entropy=entropy)
    function, variable = context.letter(), context.letter()
    polynomial = _polynomial(dice, entropy, dice.between(1, 3))
    point = dice.integer(max(0.8, min(2.0, entropy / 4)))
    context.sentences.append(f"Let {function}({variable}) = {polynomial.text(variable)}.")
    at = context.hidden(point) if composed else shown(point)
    return context.question(dice.choice(_VERBS).format(f"{function}({at})")), shown(polynomial.at(point))


def expand(dice: Dice, entropy: float) -> Question:
    """`Expand (2*x + 3)*(x - 1)**2 + x.`"""
    context = Context(dice, depth=0, entropy=entropy)
    variable = context.letter()
    result, pieces = Polynomial({(0,): 1}), []
    for share in dice.split(entropy, dice.between(2, 3)):
        factor = _polynomial(dice, max(0.8, share / 2), 1 if dice.chance(0.8) else 2)
        text = _scattered(dice, factor, variable)
        text = f"({text})" if not text.isalnum() else text
        if dice.chance(0.2):
            text, factor = f"{text}**2", factor * factor
        pieces.append(text)
        result = result * factor
    text = "*".join(pieces)
    if dice.chance(0.4):
        more = _polynomial(dice, entropy / 3, dice.between(1, 3))
        text, result = total([text, *_parts(dice, more, variable)]), result + more
    return f"Expand {text}.", result.text(variable)


def simplify_power(dice: Dice, entropy: float) -> Question:
    """`Simplify i**(4/3)*i**(1/12) assuming i is positive.`"""
    variable = Context(dice, depth=0, entropy=entropy).letter()
    text, exponent = _powers(dice, variable, dice.between(2, 3 + int(entropy)))
    if dice.chance(0.4):
        by = _exponent(dice)
        text, exponent = f"({text}){_raised(by)}", exponent * by
    answer = "1" if exponent == 0 else variable if exponent == 1 else f"{variable}{_raised(exponent)}"
    return f"Simplify {text} assuming {variable} is positive.", answer


def _powers(dice: Dice, variable: str, count: int) -> tuple[str, Fraction]:
    """A product or quotient of powers of one variable, with its exponent."""
    if count <= 1:
        if dice.chance(0.6):
            return variable, Fraction(1)
        exponent = _exponent(dice)
        return f"{variable}{_raised(exponent)}", exponent
    first = dice.between(1, count - 1)
    left, a = _powers(dice, variable, first)
    right, b = _powers(dice, variable, count - first)
    if dice.chance():
        return f"{left}*{right}", a + b
    # A quotient of products or quotients has them in brackets, on both sides.
    left, right = (f"({side})" if _has_operator(side) else side for side in (left, right))
    return f"{left}/{right}", a - b


def _has_operator(text: str) -> bool:
    """Whether there is a `*` or `/` outside brackets that is not part of a power."""
    depth = 0
    for character in text.replace("**", ""):
        depth += (character == "(") - (character == ")")
        if depth == 0 and character in "*/":
            return True
    return False


def _exponent(dice: Dice) -> Fraction:
    value = Fraction(dice.between(1, 24) * dice.sign())
    value = value / dice.between(2, 12) if dice.chance(0.6) else value
    return value if value != 1 else Fraction(2)


def _raised(exponent: Fraction) -> str:
    plain = exponent.denominator == 1 and exponent > 0
    return f"**{exponent}" if plain else f"**({exponent})"


def _polynomial(dice: Dice, entropy: float, degree: int) -> Polynomial:
    shares = dice.split(max(1.0, entropy), degree + 1)
    coefficients: list[Number] = [dice.integer(max(0.7, share)) for share in shares]
    if degree:
        coefficients[-1] = coefficients[-1] or 1
    return Polynomial.of(coefficients)


def _scattered(dice: Dice, polynomial: Polynomial, variable: str) -> str:
    """The terms in random order, some of them in two parts."""
    return total(_parts(dice, polynomial, variable))


def _parts(dice: Dice, polynomial: Polynomial, variable: str) -> list[str]:
    parts: list[str] = []
    for (power,), value in polynomial.terms.items():
        split = [value]
        if dice.chance(0.5):
            other = dice.between(-30, 30)
            split = [value - other, other]
        parts += [term(one, _power(variable, power)) for one in split if one]
    return dice.shuffled(parts) or ["0"]


def _power(variable: str, power: int) -> str:
    return "" if power == 0 else variable if power == 1 else f"{variable}**{power}"


def _times(name: str, what: str) -> str:
    return f"{name}*{what}" if what else name
