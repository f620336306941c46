"""A reader of the questions that knows nothing of how they were made: it works out each answer from the words alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from math import comb, gcd, lcm
from typing import Any

import sympy

Environment = dict[str, Any]
_NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)")
_SENTENCE = re.compile(r"(?:Let|Suppose) .*?\.(?= (?:[A-Z]|What|Is|Let))")
ORDINALS = {
    "first": 1,
    "second": 2,
    "third": 3,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
}
COUNTS = {"two": 2, "three": 3, "four": 4, "five": 5}


def value(text: str, known: Environment) -> Any:
    """An expression with exact numbers."""
    return eval(_NUMBER.sub(r"F('\1')", text), {"F": Fraction, "__builtins__": {}}, known)


def read_sentences(question: str) -> tuple[Environment, str]:
    """What the sentences before the question tell, and the question."""
    known: Environment = {}
    while (found := _SENTENCE.match(question)) is not None:
        sentence, rest = found.group().removesuffix("."), question[found.end() :].strip()
        if not _tell(sentence, known, rest):
            break
        question = rest
    return known, question


def _tell(sentence: str, known: Environment, rest: str) -> bool:
    if sentence.startswith("Suppose "):
        if re.fullmatch(r"(?:What is|Calculate) \w[?.]", rest):
            return False  # this is the question itself
        known.update(solved(sentence.removeprefix("Suppose "), known))
        return True
    body = sentence.removeprefix("Let ")
    if (function := re.fullmatch(r"(\w)\((\w)\) (?:=|be the (\w+) derivative of) (.*)", body)) is not None:
        name, variable, order, text = function.groups()
        text = called(text, known)
        if order:
            expression = sympy.sympify(text, locals=_symbols(text))
            text = str(sympy.expand(sympy.diff(expression, sympy.Symbol(variable), ORDINALS[order])))
        known[name] = lambda x: value(text, {**known, variable: x})
        known[f"{name} text"] = (variable, text)
        return True
    if (named := re.fullmatch(r"(\w) (?:=|be) (.*)", body)) is not None:
        known[named.group(1)] = value(named.group(2), known)
        return True
    return False


def called(text: str, known: Environment) -> str:
    """`f(x)` replaced by what f is."""

    def body(found: re.Match[str]) -> str:
        variable, inner = known[f"{found.group(1)} text"]
        return "(" + re.sub(rf"\b{variable}\b", found.group(2), inner) + ")"

    return re.sub(r"\b([a-z])\(([a-z])\)", body, text)


def solved(equations: str, known: Environment) -> dict[str, Fraction]:
    """One or two linear equations, solved by trying points: a linear function is known from two or three of them."""
    sides = [tuple(side.strip() for side in equation.split("=")) for equation in equations.split(",")]
    names = sorted({letter for letter in re.findall(r"[a-z]", equations) if letter not in known})

    def off(left: str, right: str, *point: int) -> Fraction:
        at = {**known, **{name: Fraction(x) for name, x in zip(names, point, strict=True)}}
        return Fraction(value(left, at)) - Fraction(value(right, at))

    if len(names) == 1:
        zero, one = off(*sides[0], 0), off(*sides[0], 1)
        return {names[0]: -zero / (one - zero)}
    assert len(names) == 2
    rows = [(off(*s, 1, 0) - off(*s, 0, 0), off(*s, 0, 1) - off(*s, 0, 0), -off(*s, 0, 0)) for s in sides]
    (a, b, e), (c, d, f) = rows
    determinant = a * d - b * c
    return {names[0]: (e * d - b * f) / determinant, names[1]: (a * f - e * c) / determinant}


def _symbols(text: str) -> dict[str, sympy.Symbol]:
    return {name: sympy.Symbol(name) for name in set(re.findall(r"[a-z]+", text)) if len(name) == 1}


def same(ours: str, theirs: str) -> bool:
    """Whether two expressions mean the same."""
    names = _symbols(ours + theirs)
    return sympy.simplify(sympy.sympify(ours, locals=names) - sympy.sympify(theirs, locals=names)) == 0


class Power:
    """A power of one positive variable, to check exponents."""

    def __init__(self, exponent: Fraction) -> None:
        self.exponent = exponent

    def __mul__(self, other: Power) -> Power:
        return Power(self.exponent + other.exponent)

    def __truediv__(self, other: Power) -> Power:
        return Power(self.exponent - other.exponent)

    def __pow__(self, by: Fraction) -> Power:
        return Power(self.exponent * by)


def digits(text: str, base: int) -> int:
    return int(text, base)


def listed(text: str, known: Environment) -> list[tuple[Fraction, str]]:
    return [(Fraction(value(one, known)), one) for one in (part.strip() for part in text.split(","))]


def bag(text: str) -> dict[str, int]:
    if text.startswith("{"):
        return {part.split(":")[0].strip(): int(part.split(":")[1]) for part in text.strip("{}").split(",")}
    return {letter: text.count(letter) for letter in text}


def check(module: str, question: str, answer: str) -> bool:
    """Whether the answer to a question is right."""
    name = module.partition("__")[2]
    for ending in ("_composed", "_big", "_longer", "_more_samples", "_more"):
        name = name.removesuffix(ending)
    checker: Callable[[str, str], bool] = globals()[f"check_{name}"]
    return checker(question, answer)


def check_linear_1d(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    found = re.fullmatch(r"Solve (.*) for (\w)\.", asked)
    assert found
    return solved(found.group(1), known)[found.group(2)] == Fraction(answer)


check_linear_2d = check_linear_1d


def check_polynomial_roots(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    asked = called(asked, known)
    factor = re.search(r"Factor (.*)\.$", asked)
    if factor:
        return same(factor.group(1), answer)
    equation = re.search(r"(?:Let |Suppose |Solve | in |that )(.*? = -?[\d/]+)", asked)
    assert equation
    left, right = equation.group(1).split(" = ")
    names = [letter for letter in set(re.findall(r"[a-z]", left)) if not isinstance(known.get(letter), Fraction)]
    assert len(names) == 1
    symbol = sympy.Symbol(names[0])
    told = {k: sympy.Rational(v.numerator, v.denominator) for k, v in known.items() if isinstance(v, Fraction)}
    roots = sympy.roots(
        sympy.Poly(sympy.sympify(left, locals={names[0]: symbol, **told}) - sympy.Rational(right), symbol)
    )
    return sorted(roots) == [sympy.Rational(root) for root in answer.split(", ")]


def check_sequence_next_term(question: str, answer: str) -> bool:
    terms = [int(term) for term in re.findall(r"-?\d+", question)]
    return _continued(terms, 1)[-1] == int(answer)


def check_sequence_nth_term(question: str, answer: str) -> bool:
    variable = re.search(r"the (\w)'th", question)
    assert variable
    terms = [int(term) for term in re.findall(r"-?\d+", question.partition(" of ")[2])]
    return all(value(answer, {variable.group(1): Fraction(n)}) == term for n, term in enumerate(terms, 1))


def _continued(terms: list[int], more: int) -> list[int]:
    rows = [terms]
    while len(rows[-1]) > 1 and any(rows[-1]):
        rows.append([b - a for a, b in zip(rows[-1], rows[-1][1:], strict=False)])
    out = list(terms)
    for _ in range(more):
        ends = [row[-1] for row in rows]
        out.append(sum(ends))
    return out


def check_add_or_sub(question: str, answer: str) -> bool:
    p, q = (Fraction(n) for n in re.findall(r"(?<![\d.])-?\d+(?:\.\d+)?", re.sub(r"(?<=\d) - ", " , ", question)))
    if "difference" in question or "distance" in question:
        return abs(p - q) == Fraction(answer)
    if "Subtract" in question or "less than" in question:
        return q - p == Fraction(answer)
    if any(word in question for word in ("minus", "take away")) or re.search(r"\d - ", question):
        return p - q == Fraction(answer)
    return p + q == Fraction(answer)


def check_add_or_sub_in_base(question: str, answer: str) -> bool:
    found = re.fullmatch(r"In base (\d+), what is (\S+) ([+-]) (\S+)\?", question)
    assert found
    base, p, sign, q = int(found.group(1)), found.group(2), found.group(3), found.group(4)
    result = digits(p, base) + (digits(q, base) if sign == "+" else -digits(q, base))
    return digits(answer, base) == result


def check_mul(question: str, answer: str) -> bool:
    p, q = (Fraction(n) for n in re.findall(r"-?\d+(?:\.\d+)?", question))
    return p * q == Fraction(answer)


def check_div(question: str, answer: str) -> bool:
    p, q = (Fraction(n) for n in re.findall(r"-?\d+", question))
    return p / q == Fraction(answer)


def check_mixed(question: str, answer: str) -> bool:
    expression = re.sub(r"^(What is the value of|What is|Evaluate|Calculate) |[?.]$", "", question)
    return value(expression, {}) == Fraction(answer)


check_add_sub_multiple = check_mul_div_multiple = check_mixed


def check_nearest_integer_root(question: str, answer: str) -> bool:
    numbers = [int(n) for n in re.findall(r"\d+", question)]
    named = {"square": 2, "cube": 3, **ORDINALS}
    word = re.search(r"the (\w+) root", question)
    degree = named[word.group(1)] if word else numbers[2]
    return abs(numbers[0] ** (1 / degree) - int(answer)) <= 0.5 + 1e-6


def check_simplify_surd(question: str, answer: str) -> bool:
    expression = question.removeprefix("Simplify ").removesuffix(".")
    difference = sympy.sympify(expression, evaluate=False).doit() - sympy.sympify(answer)
    return abs(sympy.N(difference, 30)) < 1e-15 and (
        str(sympy.sympify(answer)) == answer or same(str(sympy.sympify(answer)), answer)
    )


def check_differentiate(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    order = next((n for word, n in ORDINALS.items() if f"the {word} derivative" in asked), 1)
    found = re.search(r"(?:derivative of|Differentiate) (.*?)(?: (?:wrt|with respect to) (\w))?[.?]$", asked)
    assert found
    text, variable = found.groups()
    text = called(text, known)
    variable = variable or next(iter(set(re.findall(r"[a-z]", text))))
    return same(str(sympy.diff(sympy.sympify(text, locals=_symbols(text)), sympy.Symbol(variable), order)), answer)


def check_pair(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    two = re.fullmatch(r"Which is (\w+): (\S+) or (\S+)\?", asked)
    if two:
        a, b = value(two.group(2), known), value(two.group(3), known)
        best = max(a, b) if two.group(1) in ("bigger", "greater") else min(a, b)
        return value(answer, known) == best
    a_text, words, b_text = re.fullmatch(
        r"(?:Is|Does|Do|Are) (\S+) (.*?) (\S+?)(?: have the same value| have different values| (?:un|non)?equal)?\?",
        asked,
    ).groups()  # type: ignore[union-attr]
    a, b = value(a_text, known), value(b_text, known)
    if words == "and":
        return str((a == b) == ("same" in asked or asked.endswith(" equal?"))) == answer
    tests = {
        "less than": a < b, "<": a < b, "greater than": a > b, ">": a > b, "less than or equal to": a <= b,
        "<=": a <= b, "at most": a <= b, "at most as big as": a <= b, "at least as big as": a >= b,
        "smaller than": a < b, "bigger than": a > b, "!=": a != b, "greater than or equal to": a >= b,
        ">=": a >= b, "at least": a >= b, "equal to": a == b, "=": a == b, "not equal to": a != b,
    }  # fmt: skip
    return str(tests[words]) == answer


def _choices(asked: str, known: Environment) -> tuple[list[tuple[Fraction, str]], bool]:
    options = re.findall(r"\([a-z]\) (\S+)", asked)
    if options:
        return [(Fraction(value(one, known)), one) for one in options], True
    return listed(asked.rpartition(" in ")[2].rstrip("?"), known), False


def check_kth_biggest(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    values, lettered = _choices(asked, known)
    place = next((n for word, n in ORDINALS.items() if f"the {word} " in asked), 1)
    wanted = sorted(values, reverse="biggest" in asked)[place - 1]
    return (values["abcdefghijklm".index(answer)] if lettered else next(v for v in values if v[1] == answer))[
        0
    ] == wanted[0]


def check_closest(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    values, lettered = _choices(asked, known)
    target = value(re.search(r"(?:closest|nearest) to (\S+?)(?:\?| in)", asked).group(1), known)  # type: ignore[union-attr]
    wanted = min(values, key=lambda v: abs(v[0] - target))
    return (values["abcdefghijklm".index(answer)] if lettered else next(v for v in values if v[1] == answer))[
        0
    ] == wanted[0]


def check_sort(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    body = re.fullmatch(r"(?:Sort|Put) (.*?)(?: in (\w+) order)?\.", asked)
    assert body
    values = sorted(listed(body.group(1), known), reverse=body.group(2) in ("descending", "decreasing"))
    return [v for v, _ in values] == [v for v, _ in listed(answer, known)]


def check_time(question: str, answer: str) -> bool:
    def minutes(hour: str, minute: str, half: str) -> int:
        return (int(hour) % 12 + (12 if half == "PM" else 0)) * 60 + int(minute)

    clocks = [minutes(*clock) for clock in re.findall(r"(\d+):(\d\d) ([AP]M)", question)]
    if "between" in question:
        return (clocks[1] - clocks[0]) % 1440 == int(answer)
    shift = int(re.search(r"What is (\d+)", question).group(1))  # type: ignore[union-attr]
    after = (clocks[0] + (shift if "after" in question else -shift)) % 1440
    return minutes(*re.fullmatch(r"(\d+):(\d\d) ([AP]M)", answer).groups()) == after  # type: ignore[union-attr]


def check_base_conversion(question: str, answer: str) -> bool:
    text, first, second = re.search(r"(\S+) \(base (\d+)\) (?:to|in) base (\d+)", question).groups()  # type: ignore[union-attr]
    return digits(text, int(first)) == digits(answer, int(second))


def _last_two(question: str, pattern: str) -> tuple[int, int]:
    known, asked = read_sentences(question)
    found = re.search(pattern, asked)
    assert found
    return int(value(found.group(1), known)), int(value(found.group(2), known))


def check_div_remainder(question: str, answer: str) -> bool:
    q, p = _last_two(question, r"when (\S+) is divided by (\S+)[.?]")
    return q % p == int(answer)


def check_gcd(question: str, answer: str) -> bool:
    return gcd(*_last_two(question, r"of (\S+) and (\S+)[.?]")) == int(answer)


def check_lcm(question: str, answer: str) -> bool:
    if "denominator" in question:
        a, b = (Fraction(one) for one in re.findall(r"-?\d+/\d+", question))
        return lcm(a.denominator, b.denominator) == int(answer)
    return lcm(*_last_two(question, r"of (\S+) and (\S+)[.?]")) == int(answer)


def check_is_factor(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    if "multiple" in asked:
        number, factor = re.fullmatch(r"Is (\S+) a multiple of (\S+)\?", asked).groups()  # type: ignore[union-attr]
    else:
        factor, number = re.fullmatch(r"(?:Is|Does) (\S+) (?:a factor of|divide) (\S+)\?", asked).groups()  # type: ignore[union-attr]
    return str(value(number, known) % value(factor, known) == 0) == answer


def check_is_prime(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    number = int(value(re.fullmatch(r"Is (\S+) (?:a )?(?:prime|composite)(?: number)?\?", asked).group(1), known))  # type: ignore[union-attr]
    prime = bool(sympy.isprime(number))
    return str(prime if "prime" in asked else not prime) == answer


def check_list_prime_factors(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    number = int(value(re.search(r"of (\S+)[.?]$", asked).group(1), known))  # type: ignore[union-attr]
    return sorted(sympy.factorint(number)) == [int(p) for p in answer.split(", ")]


_PLACES = "units,tens,hundreds,thousands,ten thousands,hundred thousands,millions,ten millions,hundred millions"
_PLACES += ",billions,ten billions,hundred billions,trillions"


def check_place_value(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    place, number = re.fullmatch(r"What is the (.*) digit of (\S+)\?", asked).groups()  # type: ignore[union-attr]
    return str(int(value(number, known)))[::-1][_PLACES.split(",").index(place)] == answer


def check_round_number(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    number, to = re.fullmatch(r"(?:Round|What is) (\S+) (?:rounded )?to (.*)[.?]", asked).groups()  # type: ignore[union-attr]
    words = {"one": 1, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, **COUNTS}
    if "nearest" in to:
        unit = to.removeprefix("the nearest ")
        named = {"integer": 1, "ten": 10, "one hundred": 100, "one thousand": 1000, "ten thousand": 10**4}
        named |= {"one hundred thousand": 10**5, "one million": 10**6}
        step = Fraction(named.get(unit) or int(unit))
    else:
        count = to.split(" ")[0]
        step = Fraction(1, 10 ** (words.get(count) or int(count)))
    return (
        abs(Fraction(value(number, known)) - Fraction(answer)) < step / 2 and (Fraction(answer) / step).denominator == 1
    )


def check_add(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    text = re.fullmatch(r"(?:What is|Determine|Give|Calculate) (.*)[.?]", asked).group(1)  # type: ignore[union-attr]
    variable = re.search(r"\w\((\w)\)", text).group(1)  # type: ignore[union-attr]
    return all(
        value(text, {**known, variable: Fraction(x)}) == value(answer, {variable: Fraction(x)})
        for x in (-2, 0, 1, 3, 5)
    )


def check_compose(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    text = re.fullmatch(r"(?:What is|Determine|Give|Calculate) (.*)[.?]", asked).group(1)  # type: ignore[union-attr]
    variable = re.search(r"\((\w)\)\)", text).group(1)  # type: ignore[union-attr]
    return all(
        value(text, {**known, variable: Fraction(x)}) == value(answer, {variable: Fraction(x)})
        for x in (-2, 0, 1, 3, 5)
    )


def check_evaluate(question: str, answer: str) -> bool:
    known, asked = read_sentences(question)
    text = re.fullmatch(r"(?:What is|Determine|Give|Calculate) (.*)[.?]", asked).group(1)  # type: ignore[union-attr]
    return value(text, known) == Fraction(answer)


def check_collect(question: str, answer: str) -> bool:
    return same(question.removeprefix("Collect the terms in ").removesuffix("."), answer)


def check_expand(question: str, answer: str) -> bool:
    return same(question.removeprefix("Expand ").removesuffix("."), answer)


def check_coefficient_named(question: str, answer: str) -> bool:
    found = re.fullmatch(r"(?:Express|Rearrange) (.*?) (?:as|to|in)(?: the form)? (.*) and give (\w)\.", question)
    assert found
    expression, form, name = found.groups()
    variable = next(iter(set(re.findall(r"[a-z]", expression))), None)
    power = next(p for part in form.split(" + ") for p in [part] if part.split("*")[0] == name)
    degree = 0 if power == name else int(power.rpartition("**")[2]) if "**" in power else 1
    symbol = sympy.Symbol(variable or "x")
    return sympy.Poly(sympy.sympify(expression, locals={str(symbol): symbol}), symbol).coeff_monomial(
        symbol**degree
    ) == int(answer)


def check_simplify_power(question: str, answer: str) -> bool:
    text, variable = re.fullmatch(r"Simplify (.*) assuming (\w) is positive\.", question).groups()  # type: ignore[union-attr]
    one = {variable: Power(Fraction(1))}
    ours = value(answer, one)
    return value(text, one).exponent == (ours.exponent if isinstance(ours, Power) else 0)


def check_swr_p_sequence(question: str, answer: str) -> bool:
    counts = bag(re.search(r"replacement from (\{.*?\}|\w+)", question).group(1))  # type: ignore[union-attr]
    drawn = re.search(r"sequence (\w+)", question).group(1)  # type: ignore[union-attr]
    total, result = sum(counts.values()), Fraction(1)
    for letter in drawn:
        result *= Fraction(counts[letter], total)
        counts[letter], total = counts[letter] - 1, total - 1
    return result == Fraction(answer)


def check_swr_p_level_set(question: str, answer: str) -> bool:
    counts = bag(re.search(r"replacement from (\{.*?\}|\w+)", question).group(1))  # type: ignore[union-attr]
    event = re.search(r"picking (.*?)(?: when|[.?]$)", question).group(1)  # type: ignore[union-attr]
    wanted = {letter: int(count) for count, letter in re.findall(r"(\d+) (\w)\b", event)}
    result = Fraction(1, comb(sum(counts.values()), sum(wanted.values())))
    for letter, count in wanted.items():
        result *= comb(counts[letter], count)
    return result == Fraction(answer)


_UNITS = {
    "nanometer": 1, "micrometer": 10**3, "millimeter": 10**6, "centimeter": 10**7, "meter": 10**9, "kilometer": 10**12,
    "nanosecond": 1, "microsecond": 10**3, "millisecond": 10**6, "second": 10**9, "minute": 60 * 10**9,
    "hour": 3600 * 10**9, "day": 86400 * 10**9, "week": 604800 * 10**9, "month": 1, "year": 12, "decade": 120,
    "century": 1200, "centurie": 1200, "millennium": 12000, "millennia": 12000, "nanogram": 1, "microgram": 10**3,
    "milligram": 10**6, "gram": 10**9, "kilogram": 10**12, "tonne": 10**15, "millilitre": 1, "litre": 1000,
    "nm": 1, "um": 10**3, "mm": 10**6, "cm": 10**7, "m": 10**9, "km": 10**12, "ns": 1, "us": 10**3, "ms": 10**6,
    "s": 10**9, "ng": 1, "ug": 10**3, "mg": 10**6, "g": 10**9, "kg": 10**12, "t": 10**15, "ml": 1, "l": 1000,
}  # fmt: skip


def check_conversion(question: str, answer: str) -> bool:
    found = (
        re.fullmatch(r"What is (.*) in (\w+)\?", question)
        or re.fullmatch(r"Convert (.*) to (\w+)\.", question)
        or re.fullmatch(r"How many (?P<t>\w+) are there in (?P<a>.*)\?", question)
    )
    assert found
    amount, target = (found.group("a"), found.group("t")) if "How many" in question else found.groups()
    number = re.match(r"[\d./]+", amount)
    if number is None:
        return True  # a fraction in words: the test of the wording reads those
    unit = amount[number.end() :].removeprefix(" of a").strip()
    scale = [_UNITS[name] if name in _UNITS else _UNITS[name.removesuffix("s")] for name in (unit, target)]
    return Fraction(number.group()) * scale[0] / scale[1] == Fraction(answer)
