"""Which products a compiled block keeps within a budget of activations: as the compiler's knapsack chooses them.

The compiler may keep a share of what it keeps without a budget, besides the block's input. It takes the outputs of
products and attention whose recomputation would cost the most operations, and recomputes the rest.
"""

from __future__ import annotations

from piledriver.plan.blocks.operators import Kept, Operator
from piledriver.plan.blocks.widths import Widths

_WEIGHTS = ("weights in the compute dtype", "weights in fp8")


def products_within_budget(w: Widths, forward: tuple[Operator, ...], everything: list[Kept]) -> set[int]:
    """Return the places in `forward` of the products whose outputs are kept; `everything` is kept without a budget."""
    free = sum(one.bytes for one in everything if one.name != "block input" and not one.name.endswith(_WEIGHTS))
    capacity = w.setting.budget * free
    best: list[tuple[float, float, frozenset[int]]] = [(0.0, 0.0, frozenset())]
    for place, one in enumerate(forward):
        if one.kind != "memory":
            size = _output_bytes(w, one)
            best += [(gain + one.flops, used + size, has | {place}) for gain, used, has in best]
            best = [subset for subset in best if subset[1] <= capacity]
    return set(max(best)[2])


def kept_within_budget(w: Widths, forward: tuple[Operator, ...], everything: list[Kept]) -> tuple[Kept, ...]:
    """Return what a block keeps: its input, and outputs of products; the backward does not use the last one's."""
    chosen = products_within_budget(w, forward, everything) - {last_product(forward)}
    outputs = [Kept(f"output of {forward[place].name}", _output_bytes(w, forward[place])) for place in sorted(chosen)]
    return (w.keep("block input", w.stream), *outputs)


def recomputed_within_budget(w: Widths, forward: tuple[Operator, ...], everything: list[Kept]) -> tuple[Operator, ...]:
    """Return what the backward computes again."""
    left = {*products_within_budget(w, forward, everything), last_product(forward)}
    return tuple(one for place, one in enumerate(forward) if place not in left)


def last_product(forward: tuple[Operator, ...]) -> int:
    """Return the place of the block's last product."""
    return max(place for place, one in enumerate(forward) if one.kind == "matmul")


def _output_bytes(w: Widths, operator: Operator) -> float:
    if operator.kind == "attention":
        return w.tokens * (w.attended * w.size + w.heads * 4)
    assert operator.shape is not None
    rows, columns, _ = operator.shape
    return float(rows * columns * operator.groups * w.size)
