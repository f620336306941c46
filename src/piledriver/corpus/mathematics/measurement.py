"""Measurement: conversion of units, and times of day."""

from __future__ import annotations

from fractions import Fraction

from piledriver.corpus.mathematics.dice import Dice
from piledriver.corpus.mathematics.wording import decimal, words

Question = tuple[str, str]
# (name, plural, symbol or nothing, how many of the smallest one)
Unit = tuple[str, str, str, int]

_FAMILIES: tuple[tuple[Unit, ...], ...] = (
    (
        ("nanometer", "nanometers", "nm", 1), ("micrometer", "micrometers", "um", 10**3),
        ("millimeter", "millimeters", "mm", 10**6), ("centimeter", "centimeters", "cm", 10**7),
        ("meter", "meters", "m", 10**9), ("kilometer", "kilometers", "km", 10**12),
    ),
    (
        ("nanosecond", "nanoseconds", "ns", 1), ("microsecond", "microseconds", "us", 10**3),
        ("millisecond", "milliseconds", "ms", 10**6), ("second", "seconds", "s", 10**9),
        ("minute", "minutes", "", 60 * 10**9), ("hour", "hours", "", 3600 * 10**9),
        ("day", "days", "", 86400 * 10**9), ("week", "weeks", "", 604800 * 10**9),
    ),
    (
        ("month", "months", "", 1), ("year", "years", "", 12), ("decade", "decades", "", 120),
        ("century", "centuries", "", 1200), ("millennium", "millennia", "", 12000),
    ),
    (
        ("nanogram", "nanograms", "ng", 1), ("microgram", "micrograms", "ug", 10**3),
        ("milligram", "milligrams", "mg", 10**6), ("gram", "grams", "g", 10**9),
        ("kilogram", "kilograms", "kg", 10**12), ("tonne", "tonnes", "t", 10**15),
    ),
    (("millilitre", "millilitres", "ml", 1), ("litre", "litres", "l", 10**3)),
)  # fmt: skip
_FRACTION_NAMES = {
    2: ("half", "halves"), 3: ("third", "thirds"), 4: ("quarter", "quarters"), 5: ("fifth", "fifths"),
    6: ("sixth", "sixths"), 7: ("seventh", "sevenths"), 8: ("eighth", "eighths"), 9: ("ninth", "ninths"),
    10: ("tenth", "tenths"),
}  # fmt: skip
_DAY_MINUTES = 1440


def conversion(dice: Dice, entropy: float) -> Question:
    """`What is 51/2 of a decade in months?` or `Convert 853382.3l to millilitres.`"""
    family = dice.choice(_FAMILIES)
    return _fraction(dice, family) if dice.chance() else _decimal(dice, family, entropy)


def _fraction(dice: Dice, family: tuple[Unit, ...]) -> Question:
    """Of a bigger unit in a smaller one, so that the answer is an integer."""
    for _ in range(200):
        small, big = sorted(dice.sample(range(len(family)), 2))
        ratio = family[big][3] // family[small][3]
        denominator = dice.between(2, 10)
        value = Fraction(dice.between(1, 10 * denominator), denominator)
        if value.denominator != 1 and (value * ratio).denominator == 1 and value * ratio < 10**9:
            break
    else:
        return _decimal(dice, family, 4.0)
    named = _FRACTION_NAMES[value.denominator]
    amount = f"{words(value.numerator)} {named[value.numerator != 1]}" if dice.chance() else str(value)
    unit, target = family[big][0], family[small][1]
    asked = dice.choice(("What is {a} of a {u} in {t}?", "How many {t} are there in {a} of a {u}?"))
    return asked.format(a=amount, u=unit, t=target), str(value * ratio)


def _decimal(dice: Dice, family: tuple[Unit, ...], entropy: float) -> Question:
    for _ in range(200):
        first, second = dice.sample(range(len(family)), 2)
        places = dice.between(1, 5)
        value = Fraction(dice.nonzero(max(1.0, entropy * 0.8), signed=False), 10**places)
        result = value * Fraction(family[first][3], family[second][3])
        # An answer that does not end, or that nobody would write down, is not asked for.
        if 10**18 % result.denominator == 0 and result < 10**15:
            break
    else:
        first, second, value = 1, 0, Fraction(3, 2)
        result = value * Fraction(family[1][3], family[0][3])
    name, target = f"{decimal(value)} {family[first][1]}", family[second][1]
    if family[first][2] and dice.chance(0.4):
        name = f"{decimal(value)}{family[first][2]}"
    asked = dice.choice(("What is {n} in {t}?", "How many {t} are there in {n}?", "Convert {n} to {t}."))
    return asked.format(n=name, t=target), decimal(result)


def time(dice: Dice, entropy: float) -> Question:
    """`What is 320 minutes before 6:57 PM?`"""
    start = dice.below(_DAY_MINUTES)
    minutes = dice.between(1, 719)
    end = (start + minutes) % _DAY_MINUTES
    kind = dice.below(3)
    if kind == 0:
        return f"How many minutes are there between {_clock(start)} and {_clock(end)}?", str(minutes)
    if kind == 1:
        return f"What is {minutes} minutes before {_clock(end)}?", _clock(start)
    return f"What is {minutes} minutes after {_clock(start)}?", _clock(end)


def _clock(minutes: int) -> str:
    hour, minute = divmod(minutes, 60)
    return f"{hour % 12 or 12}:{minute:02d} {'AM' if hour < 12 else 'PM'}"
