"""Linear equations with a chosen solution, in one and two unknowns."""

from __future__ import annotations

from piledriver.corpus.mathematics.arithmetic_tree import Node
from piledriver.corpus.mathematics.dice import Dice
from piledriver.corpus.mathematics.wording import total


def linear_equation(
    dice: Dice, variable: str, solution: int, size: int, *, terms: int, named: Node | None = None
) -> str:
    """`-16*d - 594 = 98*d - 15*d`: an equation in one unknown; `named` may stand in for one coefficient."""
    size = max(3, size)
    while True:
        coefficients = [dice.between(-size, size) for _ in range(max(1, terms - 1))]
        sides = [dice.sign() for _ in coefficients]
        if named is not None:
            coefficients.append(int(named.value))
            sides.append(dice.sign())
        # Left side counts up, right side counts down: what is left must not cancel.
        net = sum(c * side for c, side in zip(coefficients, sides, strict=True))
        if net:
            break
    constant = -net * solution
    texts = [_times(c, variable) for c in coefficients]
    if named is not None:
        texts[-1] = f"{named.text}*{variable}"
    left = [text for text, side in zip(texts, sides, strict=True) if side > 0]
    right = [text for text, side in zip(texts, sides, strict=True) if side < 0]
    _place_constant(dice, constant, size, left, right)
    return _equation(dice, left, right)


def linear_pair(dice: Dice, variables: tuple[str, str], solution: tuple[int, int], size: int) -> str:
    """Two equations in two unknowns, with exactly this solution."""
    size = max(2, size)
    while True:
        a, b, c, d = (dice.between(-size, size) for _ in range(4))
        if a * d != b * c:
            break
    equations = []
    for first, second in ((a, b), (c, d)):
        left: list[str] = []
        right: list[str] = []
        for coefficient, variable in ((first, variables[0]), (second, variables[1])):
            for part in _parts(dice, coefficient):
                if dice.chance(0.6):
                    left.append(_times(part, variable))
                else:
                    right.append(_times(-part, variable))
        constant = -(first * solution[0] + second * solution[1])
        _place_constant(dice, constant, size, left, right)
        equations.append(_equation(dice, left, right))
    return ", ".join(dice.shuffled(equations))


def _parts(dice: Dice, coefficient: int) -> list[int]:
    if dice.chance(0.75):
        return [coefficient] if coefficient else []
    other = dice.between(-20, 20)
    return [coefficient - other, other]


def _place_constant(dice: Dice, constant: int, size: int, left: list[str], right: list[str]) -> None:
    """Put `constant` on the left, or its opposite on the right, whole or in two parts."""
    parts = [constant]
    if dice.chance(0.3):
        other = dice.between(-size, size)
        parts = [constant - other, other]
    for part in parts:
        if part == 0 and (left or right) and dice.chance(0.9):
            continue
        if dice.chance():
            left.append(str(part))
        else:
            right.append(str(-part))


def _equation(dice: Dice, left: list[str], right: list[str]) -> str:
    sides = [total(dice.shuffled(left)), total(dice.shuffled(right))]
    return " = ".join(sides if dice.chance() else sides[::-1])


def _times(coefficient: int, variable: str) -> str:
    return variable if coefficient == 1 else f"-{variable}" if coefficient == -1 else f"{coefficient}*{variable}"
