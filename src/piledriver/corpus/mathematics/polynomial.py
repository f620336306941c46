"""Polynomials with exact coefficients: as few operations as the questions need, on plain dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import gcd, lcm

from piledriver.corpus.mathematics.wording import Number, term, total

Powers = tuple[int, ...]


class Polynomial:
    """Coefficients by powers of the variables, in one or several of them.

    >>> p = Polynomial.of([6, -5, 1])
    >>> p.text("x"), p.at(4), (p * p).text("x")
    ('x**2 - 5*x + 6', 2, 'x**4 - 10*x**3 + 37*x**2 - 60*x + 36')
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Powers, Number]) -> None:
        self.terms = {powers: value for powers, value in terms.items() if value}

    @classmethod
    def of(cls, coefficients: list[Number] | list[int]) -> Polynomial:
        """In one variable, from the constant term upwards."""
        return cls({(power,): value for power, value in enumerate(coefficients)})

    @property
    def degree(self) -> int:
        """The highest power of the first variable; 0 for nothing."""
        return max((powers[0] for powers in self.terms), default=0)

    def coefficient(self, power: int) -> Number:
        """In one variable, the coefficient of a power."""
        return self.terms.get((power,), 0)

    def __add__(self, other: Polynomial) -> Polynomial:
        merged = dict(self.terms)
        for powers, value in other.terms.items():
            merged[powers] = merged.get(powers, 0) + value
        return Polynomial(merged)

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + other.times(-1)

    def __mul__(self, other: Polynomial) -> Polynomial:
        product: dict[Powers, Number] = {}
        for mine, a in self.terms.items():
            for theirs, b in other.terms.items():
                powers = tuple(x + y for x, y in zip(mine, theirs, strict=True))
                product[powers] = product.get(powers, 0) + a * b
        return Polynomial(product)

    def times(self, number: Number) -> Polynomial:
        """Every coefficient multiplied."""
        return Polynomial({powers: value * number for powers, value in self.terms.items()})

    def at(self, value: Number) -> Number:
        """In one variable, the value at a point."""
        result: Number = 0
        for power in range(self.degree, -1, -1):
            result = result * value + self.coefficient(power)
        return result

    def compose(self, inner: Polynomial) -> Polynomial:
        """In one variable, `self(inner(x))`."""
        result = Polynomial({})
        for power in range(self.degree, -1, -1):
            result = result * inner + Polynomial({(0,): self.coefficient(power)})
        return result

    def derivative(self, variable: int = 0) -> Polynomial:
        """With respect to one of the variables."""
        found: dict[Powers, Number] = {}
        for powers, value in self.terms.items():
            if powers[variable]:
                lower = tuple(p - (i == variable) for i, p in enumerate(powers))
                found[lower] = value * powers[variable]
        return Polynomial(found)

    def integral(self) -> Polynomial:
        """In one variable, without a constant."""
        return Polynomial({(power + 1,): Fraction(value) / (power + 1) for (power,), value in self.terms.items()})

    def text(self, *names: str) -> str:
        """As sympy prints it: higher powers of the first variable first."""
        ordered = sorted(self.terms, reverse=True)
        lone_number = len(ordered) == 2 and not any(ordered[1]) and sum(map(bool, ordered[0])) == 1
        if lone_number and self.terms[ordered[1]] > 0 > self.terms[ordered[0]]:
            # Of a positive number and one negative term sympy prints the number first: `3 - x`.
            ordered.reverse()
        return total(term(self.terms[powers], monomial(powers, names)) for powers in ordered)


def monomial(powers: Powers, names: tuple[str, ...]) -> str:
    """`x**2*y` of (2, 1)."""
    parts = [name if p == 1 else f"{name}**{p}" for name, p in zip(names, powers, strict=True) if p]
    return "*".join(parts)


def from_roots(roots: list[Fraction], scale: Number) -> Polynomial:
    """The polynomial with these roots and this leading coefficient."""
    result = Polynomial({(0,): 1})
    for root in roots:
        result = result * Polynomial({(1,): 1, (0,): -root})
    return result.times(scale)


def factored(roots: list[Fraction], scale: Fraction, name: str) -> str:
    """As sympy's `factor` prints it: `-3*x*(x - 2)**2*(2*x + 1)/7`.

    >>> factored([Fraction(0), Fraction(2), Fraction(2), Fraction(-1, 2)], Fraction(-6, 7), "x")
    '-3*x*(x - 2)**2*(2*x + 1)/7'
    """
    for root in roots:
        scale /= root.denominator
    counted = {root: roots.count(root) for root in roots}
    ordered = sorted(counted, key=lambda root: (root != 0, root.denominator, -root))
    parts = []
    for root in ordered:
        one = name if root == 0 else f"({total([term(root.denominator, name), term(-root.numerator, '')])})"
        parts.append(f"{one}**{counted[root]}" if counted[root] > 1 else one)
    top = "" if scale.numerator == 1 else "-" if scale.numerator == -1 else f"{scale.numerator}*"
    return top + "*".join(parts) + (f"/{scale.denominator}" if scale.denominator != 1 else "")


def integer_scale(values: list[Fraction]) -> Fraction:
    """What makes all of them integers without a common factor."""
    denominator = lcm(*(value.denominator for value in values))
    numerator = gcd(*(int(value * denominator) for value in values))
    return Fraction(denominator, numerator or 1)
