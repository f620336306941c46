"""The modules and the levels: which question is asked where, and how hard its numbers are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from piledriver.core.errors import UnknownNameError
from piledriver.core.random import Stream
from piledriver.corpus.mathematics import (
    algebra,
    arithmetic,
    calculus,
    comparison,
    measurement,
    numbers,
    polynomials,
    probability,
)
from piledriver.corpus.mathematics.dice import Dice

Question = tuple[str, str]
Ask = Callable[[Dice, float], Question]

LEVELS = ("train-easy", "train-medium", "train-hard", "interpolate", "extrapolate")


@dataclass(frozen=True)
class Module:
    """How to ask, and how much choice there is in the numbers, in decimal digits: while training, when testing."""

    ask: Ask
    train: tuple[float, float] = (3.0, 10.0)
    test: tuple[float, float] = (8.0, 8.0)

    def entropy(self, level: str, dice: Dice) -> float:
        """Training has three levels of equal width."""
        low, high = self.train
        if level in LEVELS[:3]:
            step = (high - low) / 3
            third = LEVELS.index(level)
            return dice.real(low + third * step, low + (third + 1) * step)
        return dice.real(*self.test)


def _plain(ask: Callable[..., Question], **changes: tuple[float, float]) -> Module:
    return Module(ask, **changes)


def _both(name: str, ask: Callable[..., Question]) -> dict[str, Module]:
    """A module and its composed form, whose numbers are told by other questions."""
    return {name: _plain(ask), f"{name}_composed": _plain(partial(ask, composed=True))}


_WIDE = {"train": (4.0, 16.0), "test": (12.0, 12.0)}
_BIG = (16.0, 20.0)
_FAR = (12.0, 12.0)

MODULES: dict[str, Module] = {
    **_both("algebra__linear_1d", algebra.linear_1d),
    **_both("algebra__linear_2d", algebra.linear_2d),
    **_both("algebra__polynomial_roots", algebra.polynomial_roots),
    "algebra__sequence_next_term": _plain(algebra.sequence_next_term),
    "algebra__sequence_nth_term": _plain(algebra.sequence_nth_term),
    "arithmetic__add_or_sub": _plain(arithmetic.add_or_sub, **_WIDE),
    "arithmetic__add_or_sub_in_base": _plain(arithmetic.add_or_sub_in_base, **_WIDE),
    "arithmetic__add_sub_multiple": _plain(arithmetic.add_sub_multiple),
    "arithmetic__div": _plain(arithmetic.div, **_WIDE),
    "arithmetic__mixed": _plain(arithmetic.mixed),
    "arithmetic__mul": _plain(arithmetic.mul, **_WIDE),
    "arithmetic__mul_div_multiple": _plain(arithmetic.mul_div_multiple),
    "arithmetic__nearest_integer_root": _plain(arithmetic.nearest_integer_root),
    "arithmetic__simplify_surd": _plain(arithmetic.simplify_surd),
    **_both("calculus__differentiate", calculus.differentiate),
    **_both("comparison__closest", comparison.closest),
    **_both("comparison__kth_biggest", comparison.kth_biggest),
    **_both("comparison__pair", comparison.pair),
    **_both("comparison__sort", comparison.sort),
    "measurement__conversion": _plain(measurement.conversion),
    "measurement__time": _plain(measurement.time),
    "numbers__base_conversion": _plain(numbers.base_conversion),
    **_both("numbers__div_remainder", numbers.div_remainder),
    **_both("numbers__gcd", numbers.gcd),
    **_both("numbers__is_factor", numbers.is_factor),
    **_both("numbers__is_prime", numbers.is_prime),
    **_both("numbers__lcm", numbers.lcm),
    **_both("numbers__list_prime_factors", numbers.list_prime_factors),
    **_both("numbers__place_value", numbers.place_value),
    **_both("numbers__round_number", numbers.round_number),
    "polynomials__add": _plain(polynomials.add),
    "polynomials__coefficient_named": _plain(polynomials.coefficient_named),
    "polynomials__collect": _plain(polynomials.collect),
    "polynomials__compose": _plain(polynomials.compose),
    **_both("polynomials__evaluate", polynomials.evaluate),
    "polynomials__expand": _plain(polynomials.expand),
    "polynomials__simplify_power": _plain(polynomials.simplify_power),
    "probability__swr_p_level_set": _plain(probability.swr_p_level_set),
    "probability__swr_p_sequence": _plain(probability.swr_p_sequence),
}

EXTRAPOLATE: dict[str, Module] = {
    "algebra__polynomial_roots_big": _plain(algebra.polynomial_roots, test=(10.0, 16.0)),
    "arithmetic__add_or_sub_big": _plain(arithmetic.add_or_sub, test=_BIG),
    "arithmetic__add_sub_multiple_longer": _plain(partial(arithmetic.add_sub_multiple, longer=True), test=_FAR),
    "arithmetic__div_big": _plain(arithmetic.div, test=_BIG),
    "arithmetic__mixed_longer": _plain(partial(arithmetic.mixed, longer=True), test=_FAR),
    "arithmetic__mul_big": _plain(arithmetic.mul, test=_BIG),
    "arithmetic__mul_div_multiple_longer": _plain(partial(arithmetic.mul_div_multiple, longer=True), test=_FAR),
    "comparison__closest_more": _plain(partial(comparison.closest, more=True), test=_FAR),
    "comparison__kth_biggest_more": _plain(partial(comparison.kth_biggest, more=True), test=_FAR),
    "comparison__sort_more": _plain(partial(comparison.sort, more=True), test=_FAR),
    "measurement__conversion": _plain(measurement.conversion, test=_FAR),
    "numbers__place_value_big": _plain(numbers.place_value, test=_FAR),
    "numbers__round_number_big": _plain(numbers.round_number, test=_FAR),
    "probability__swr_p_level_set_more_samples": _plain(partial(probability.swr_p_level_set, more=True), test=_FAR),
    "probability__swr_p_sequence_more_samples": _plain(partial(probability.swr_p_sequence, more=True), test=_FAR),
}


def modules_of(level: str) -> dict[str, Module]:
    """The modules of a level: extrapolation has its own."""
    if level not in LEVELS:
        raise UnknownNameError("level", level, LEVELS)
    return EXTRAPOLATE if level == "extrapolate" else MODULES


def question(seed: int, level: str, module: str, number: int) -> Question:
    """Question `number` of a module at a level: always the same one, whoever asks, wherever.

    >>> question(0, "train-easy", "numbers__gcd", 3) == question(0, "train-easy", "numbers__gcd", 3)
    True
    """
    return next(questions(seed, level, module, number, 1))


def questions(seed: int, level: str, module: str, first: int, count: int) -> Iterator[Question]:
    """Questions `first` to `first + count - 1` of a module at a level."""
    asked = modules_of(level)
    if module not in asked:
        raise UnknownNameError("module", module, asked)
    starts = Stream(seed, "dm-mathematics", level, module).bits(np.arange(first, first + count))
    for start in starts.tolist():
        dice = Dice(start)
        yield asked[module].ask(dice, asked[module].entropy(level, dice))
