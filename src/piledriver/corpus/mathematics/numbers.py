"""Numbers: bases, remainders, divisors, multiples, primes, digits, rounding."""

from __future__ import annotations

from fractions import Fraction
from math import gcd as greatest
from math import lcm as least

from piledriver.corpus.mathematics.composition import Context
from piledriver.corpus.mathematics.dice import Dice
from piledriver.corpus.mathematics.primes import is_prime as primality
from piledriver.corpus.mathematics.primes import prime_factors
from piledriver.corpus.mathematics.wording import decimal, in_base, listed, shown, words

Question = tuple[str, str]

_PLACES = (
    "units", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands", "millions", "ten millions",
    "hundred millions", "billions", "ten billions", "hundred billions", "trillions",
)  # fmt: skip


def _context(dice: Dice, entropy: float, composed: bool) -> Context:
    return Context(dice, depth=3 if composed else 0, entropy=entropy)


def _show(context: Context, value: int, composed: bool) -> str:
    return context.hidden(value) if composed else shown(value)


def base_conversion(dice: Dice, entropy: float) -> Question:
    """`Convert 6351 (base 7) to base 3.`"""
    first, second = dice.sample(range(2, 17), 2)
    value = dice.integer(entropy)
    asked = dice.choice(
        ("{v} (base {a}) to base {b}", "What is {v} (base {a}) in base {b}?", "Convert {v} (base {a}) to base {b}.")
    )
    return asked.format(v=in_base(value, first), a=first, b=second), in_base(value, second)


def div_remainder(dice: Dice, entropy: float, composed: bool = False) -> Question:
    """`Calculate the remainder when 968581 is divided by 1434.`"""
    context = _context(dice, entropy, composed)
    if composed:
        entropy = min(entropy, 6.0)
    first, second = dice.split(entropy, 2)
    divisor = dice.nonzero(max(0.9, first), signed=False) + 1
    value = divisor * dice.nonzero(max(0.5, second), signed=False) + dice.below(divisor)
    q, p = _two(dice, context, value, divisor, composed)
    asked = dice.choice(
        ("Calculate the remainder when {q} is divided by {p}.", "What is the remainder when {q} is divided by {p}?")
    )
    return context.question(asked.format(q=q, p=p)), shown(value % divisor)


def gcd(dice: Dice, entropy: float, composed: bool = False) -> Question:
    """`What is the highest common factor of 186 and 248?`"""
    context = _context(dice, entropy, composed)
    if composed:
        entropy = min(entropy, 6.0)
    shares = dice.split(entropy, 3)
    common = dice.nonzero(max(0.5, shares[0]), signed=False)
    p, q = (common * dice.nonzero(max(0.5, share), signed=False) for share in shares[1:])
    word = f"{dice.choice(('greatest', 'highest'))} common {dice.choice(('divisor', 'factor'))}"
    asked = dice.choice(("Calculate the {w} of {p} and {q}.", "What is the {w} of {p} and {q}?"))
    a, b = _two(dice, context, p, q, composed)
    return context.question(asked.format(w=word, p=a, q=b)), shown(greatest(p, q))


def lcm(dice: Dice, entropy: float, composed: bool = False) -> Question:
    """`Calculate the least common multiple of 12 and 32.` or `What is the common denominator of -43/6 and 5/9?`"""
    context = _context(dice, entropy, composed)
    shares = dice.split(min(entropy, 10.0), 3)
    common = dice.nonzero(max(0.4, shares[0] / 2), signed=False)
    p, q = (common * dice.nonzero(max(0.5, share / 2), signed=False) for share in shares[1:])
    if not composed and p > 1 and q > 1 and dice.chance(0.35):
        a, b = (_over(dice, denominator) for denominator in (p, q))
        verb = dice.choice(
            (
                "What is the common denominator of {a} and {b}?",
                "Calculate the common denominator of {a} and {b}.",
                "Find the common denominator of {a} and {b}.",
            )
        )
        return verb.format(a=a, b=b), shown(least(p, q))
    word = dice.choice(("least common multiple", "lowest common multiple", "smallest common multiple"))
    asked = dice.choice(("Calculate the {w} of {p} and {q}.", "What is the {w} of {p} and {q}?"))
    a_text, b_text = _two(dice, context, p, q, composed)
    return context.question(asked.format(w=word, p=a_text, q=b_text)), shown(least(p, q))


def is_factor(dice: Dice, entropy: float, composed: bool = False) -> Question:
    """`Is 15 a factor of 720?`"""
    context = _context(dice, entropy, composed)
    if composed:
        entropy = min(entropy, 6.0)
    first, second = dice.split(entropy, 2)
    factor = dice.nonzero(max(0.7, min(2.0, first)), signed=False) + 1
    value = factor * dice.nonzero(max(0.7, second), signed=False)
    if dice.chance():
        value += dice.between(1, factor - 1) if factor > 1 else 0
    number = _show(context, value, composed)
    asked = dice.choice(("Is {f} a factor of {n}?", "Is {n} a multiple of {f}?", "Does {f} divide {n}?"))
    return context.question(asked.format(f=factor, n=number)), str(value % factor == 0)


def is_prime(dice: Dice, entropy: float, composed: bool = False) -> Question:
    """`Is 20396 a prime number?`"""
    context = _context(dice, entropy, composed)
    bits = min(entropy, 6.0) if composed else entropy
    value = dice.nonzero(max(1.0, bits), signed=False) + 1
    if dice.chance():
        # Otherwise nearly every number would be composite.
        value |= 1
        while not primality(value):
            value += 2
    elif dice.chance(0.7):
        value |= 1
    prime = primality(value)
    number = _show(context, value, composed)
    if dice.chance():
        asked, answer = dice.choice(("Is {} prime?", "Is {} a prime number?")), prime
    else:
        asked, answer = dice.choice(("Is {} composite?", "Is {} a composite number?")), value > 1 and not prime
    return context.question(asked.format(number)), str(answer)


def list_prime_factors(dice: Dice, entropy: float, composed: bool = False) -> Question:
    """`List the prime factors of 645090.`"""
    context = _context(dice, entropy, composed)
    value = dice.nonzero(max(1.0, min(entropy, 6.0) if composed else entropy), signed=False) + 1
    number = _show(context, value, composed)
    asked = dice.choice(("What are the prime factors of {}?", "List the prime factors of {}."))
    return context.question(asked.format(number)), listed(shown(p) for p in prime_factors(value))


def place_value(dice: Dice, entropy: float, composed: bool = False) -> Question:
    """`What is the thousands digit of 1094?`"""
    context = _context(dice, entropy, composed)
    value = dice.nonzero(max(1.0, min(entropy, 6.0) if composed else entropy), signed=False)
    digits = str(value)[::-1]
    place = dice.below(min(len(digits), len(_PLACES)))
    number = _show(context, value, composed)
    return context.question(f"What is the {_PLACES[place]} digit of {number}?"), digits[place]


def round_number(dice: Dice, entropy: float, composed: bool = False) -> Question:
    """`Round -366.312888197 to the nearest integer.`"""
    context = _context(dice, entropy, composed)
    entropy = min(entropy, 6.0) if composed else entropy
    while True:
        places = dice.between(0, max(1, int(entropy)))
        value = Fraction(dice.nonzero(max(1.0, entropy)), 10**places)
        # Positive: decimal places; negative: the nearest ten, hundred, ...
        to = dice.between(-6, places - 1) if places else dice.between(-6, -1)
        scaled = value * Fraction(10) ** to
        if abs(scaled) > Fraction(1, 2) and (2 * scaled).denominator != 1:
            break
    rounded = Fraction(_nearest(scaled)) / Fraction(10) ** to
    number = context.hidden(value) if composed else decimal(value)
    asked = dice.choice(("Round {n} to {t}.", "What is {n} rounded to {t}?"))
    return context.question(asked.format(n=number, t=_precision(dice, to))), decimal(rounded)


def _precision(dice: Dice, to: int) -> str:
    if to > 0:
        count = words(to) if dice.chance() else str(to)
        if dice.chance():
            return f"{count} {'dp' if to == 1 else 'dps'}"
        return f"{count} decimal {'place' if to == 1 else 'places'}"
    if to == 0:
        return "the nearest integer"
    value = 10**-to
    if dice.chance() or value >= 10**6:
        return f"the nearest {value}" if value != 10**6 or dice.chance() else "the nearest one million"
    return f"the nearest {words(value) if value != 10 else 'ten'}"


def _nearest(value: Fraction) -> int:
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)


def _over(dice: Dice, denominator: int) -> str:
    numerator = dice.nonzero(2.0)
    while greatest(numerator, denominator) != 1:
        numerator += 1
    return f"{numerator}/{denominator}"


def _two(dice: Dice, context: Context, first: int, second: int, composed: bool) -> tuple[str, str]:
    """Two numbers, of which one or both are told by sentences in a composed question."""
    if not composed:
        return shown(first), shown(second)
    which = dice.below(3)
    return (
        context.hidden(first) if which != 1 else shown(first),
        context.hidden(second) if which != 0 else shown(second),
    )
