"""Probability: letters picked without replacement."""

from __future__ import annotations

from fractions import Fraction
from math import comb

from piledriver.corpus.mathematics.dice import Dice
from piledriver.corpus.mathematics.wording import LETTERS, words

Question = tuple[str, str]
_VERBS = ("What is prob of {e}", "Calculate prob of {e}", "Give prob of {e}")


def swr_p_sequence(dice: Dice, entropy: float, more: bool = False) -> Question:
    """`What is prob of sequence anaa when four letters picked without replacement from {a: 4, n: 7}?`"""
    counts, drawn = _bag(dice, more)
    left, probability = dict(counts), Fraction(1)
    for number, letter in enumerate(drawn):
        probability *= Fraction(left[letter], sum(counts.values()) - number)
        left[letter] -= 1
    return _asked(dice, counts, f"sequence {''.join(drawn)}", len(drawn)), str(probability)


def swr_p_level_set(dice: Dice, entropy: float, more: bool = False) -> Question:
    """`What is prob of picking 2 q and 1 e when three letters picked without replacement from {q: 3, e: 4}?`"""
    counts, drawn = _bag(dice, more)
    wanted = {letter: drawn.count(letter) for letter in dict.fromkeys(drawn)}
    ways = 1
    for letter, count in wanted.items():
        ways *= comb(counts[letter], count)
    probability = Fraction(ways, comb(sum(counts.values()), len(drawn)))
    parts = [f"{count} {letter}" for letter, count in wanted.items()]
    event = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    return _asked(dice, counts, f"picking {event}", len(drawn)), str(probability)


def _bag(dice: Dice, more: bool) -> tuple[dict[str, int], list[str]]:
    """Letters with how often they are in the bag, and some that may be drawn from it."""
    size = dice.between(5, 19)
    kinds = dice.sample(LETTERS, dice.between(1, min(6, size)))
    bag = [*kinds, *(dice.choice(kinds) for _ in range(size - len(kinds)))]
    counts = {letter: bag.count(letter) for letter in kinds}
    picks = dice.between(4, 5) if more else dice.between(2, 4)
    return counts, dice.sample(bag, min(picks, size))


def _asked(dice: Dice, counts: dict[str, int], event: str, picks: int) -> str:
    if dice.chance():
        bag = "{" + ", ".join(f"{letter}: {count}" for letter, count in counts.items()) + "}"
    else:
        bag = "".join(dice.shuffled([letter for letter, count in counts.items() for _ in range(count)]))
    drawn = f"{words(picks)} letters picked without replacement from {bag}"
    if dice.chance():
        verb = dice.choice(_VERBS).format(e=event)
        return f"{drawn[0].upper()}{drawn[1:]}. {verb}{'?' if verb.startswith('What') else '.'}"
    verb = dice.choice(_VERBS[:2]).format(e=event)
    return f"{verb} when {drawn}{'?' if verb.startswith('What') else '.'}"
