"""How the questions write numbers: words, ordinals, decimals, and terms with their signs."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety"
_ORDINALS = "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
SMALL, TENS, ORDINALS = _SMALL.split(), _TENS.split(), _ORDINALS.split()
ORDINAL = dict(enumerate(ORDINALS))
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Letters that stand for variables: e is a number, and i is used as freely as in the original.
VARIABLES = "abcdfghijklmnopqrstuvwxyz"

Number = Fraction | int


def words(number: int) -> str:
    """A number from 0 to 999,999 in words.

    >>> words(21), words(100000)
    ('twenty-one', 'one hundred thousand')
    """
    if number < 20:
        return SMALL[number]
    if number < 100:
        return TENS[number // 10] + (f"-{SMALL[number % 10]}" if number % 10 else "")
    if number < 1000:
        rest = f" and {words(number % 100)}" if number % 100 else ""
        return f"{SMALL[number // 100]} hundred{rest}"
    rest = f" {words(number % 1000)}" if number % 1000 else ""
    return f"{words(number // 1000)} thousand{rest}"


def shown(value: Number) -> str:
    """An integer or a fraction, `-3/7`."""
    return str(value)


def decimal(value: Number) -> str:
    """A number that ends after some decimal places.

    >>> decimal(Fraction(-5, 8)), decimal(Fraction(300))
    ('-0.625', '300')
    """
    value = Fraction(value)
    places = 0
    while value.denominator != 1 and (value * 10**places).denominator != 1:
        places += 1
    scaled = abs(value.numerator * 10**places // value.denominator)
    digits = str(scaled).rjust(places + 1, "0")
    text = f"{digits[:-places]}.{digits[-places:]}" if places else digits
    return f"-{text}" if value < 0 else text


def term(coefficient: Number, what: str) -> str:
    """`-3*x**2/7`, `x`, `-x`, `5`: a coefficient with what it multiplies, as sympy prints it."""
    if not what:
        return shown(coefficient)
    value = Fraction(coefficient)
    numerator = "" if value.numerator == 1 else "-" if value.numerator == -1 else f"{value.numerator}*"
    return f"{numerator}{what}" + (f"/{value.denominator}" if value.denominator != 1 else "")


def total(terms: Iterable[str]) -> str:
    """Terms with their signs between them.

    >>> total(["-x", "3", "-y/2"])
    '-x + 3 - y/2'
    """
    text = ""
    for one in terms:
        if not text:
            text = one
        else:
            text += f" - {one[1:]}" if one.startswith("-") else f" + {one}"
    return text or "0"


def listed(values: Iterable[str]) -> str:
    """Values with commas between them."""
    return ", ".join(values)


def in_base(value: int, base: int) -> str:
    """An integer in another base, digits beyond 9 as letters."""
    if value == 0:
        return "0"
    digits, left = "", abs(value)
    while left:
        left, digit = divmod(left, base)
        digits = f"{'0123456789abcdefghijklmnopqrstuvwxyz'[digit]}{digits}"
    return f"-{digits}" if value < 0 else digits
