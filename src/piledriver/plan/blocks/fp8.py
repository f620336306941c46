"""Which products of a block run in fp8, the traffic of the casts around them, and the bytes that they keep.

The engine's layers cast a matrix in two passes: one finds its largest magnitude, one writes it by rows and by columns.
A gated MLP computes its activation inside these passes.
"""

from __future__ import annotations

from piledriver.engine.fp8.apply import WORTH
from piledriver.kernels.fp8 import MULTIPLE
from piledriver.plan.blocks.operators import Operator, matmul, moved
from piledriver.plan.blocks.widths import Widths

# The share of `WORTH` from which a gated MLP pays.
_FUSED_SHARE = 0.8
# Bytes of an activation of the gated MLP: forward, two reads of gate and up and a write of 8 bits; backward, two reads
# of gate, up and the gradient, and writes of both gradients by rows and by columns and of the activation by columns.
_GATE_BYTES, _GATE_GRADIENT_BYTES = 4 + 4 + 1, 6 + 6 + 2 + 2 + 1
CASTS = "casts to fp8"
"""The name of casts in a forward: those of the backward are counted with its products."""


def runs_in_fp8(w: Widths, rows: float, columns: float, worth: float = WORTH) -> bool:
    """Return whether the engine computes a product with a weight of this shape in fp8."""
    if not w.setting.precision.startswith("fp8"):
        return False
    if w.setting.traits.name != "piledriver":
        return True
    if round(rows) % MULTIPLE or round(columns) % MULTIPLE:
        return False
    return rows * columns >= worth * (rows + columns)


def mlp_is_one_operator(w: Widths, width: float) -> bool:
    """Return whether a gated MLP of this width is one fp8 operator."""
    if not w.fuses_gate or w.setting.precision == "fp8-rowwise":
        return False
    worth = _FUSED_SHARE * WORTH
    return runs_in_fp8(w, 2 * width, w.dim, worth) and runs_in_fp8(w, w.dim, width, worth)


def keeps_columns(w: Widths, rows: float, columns: float) -> bool:
    """Return whether a product keeps its input and its weight by columns, in 8 bits."""
    return w.setting.precision != "fp8-rowwise" and runs_in_fp8(w, rows, columns)


def linear_operators(w: Widths, name: str, rows: float, columns: float, tokens: float | None = None) -> list[Operator]:
    """Return a product of `tokens` with a weight of [rows, columns], and its casts if it runs in fp8."""
    tokens = w.tokens if tokens is None else tokens
    is_fp8 = runs_in_fp8(w, rows, columns)
    product = matmul(name, tokens, rows, columns, w.size, precision="fp8" if is_fp8 else w.setting.wide_precision)
    # Attention writes 16 bits; norms and activations may write 8.
    inputs = 0.0 if w.setting.traits.fused_casts and name != "out" else tokens * columns
    return [*_casts(w, inputs, rows * columns, is_fp8=is_fp8), product]


def gradient_casts(w: Widths, product: Operator) -> list[Operator]:
    """Return the casts of the gradient of an fp8 product; the one operator of a gated MLP casts that of its first."""
    if product.precision != "fp8" or product.shape is None or product.name.endswith(_INSIDE):
        return []
    rows, columns, _ = product.shape
    if w.setting.traits.fused_casts and product.name.endswith("up"):
        return []  # written by the activation's backward
    return [moved(CASTS, _cast_bytes(w) * rows * columns)]


_INSIDE = ", gated"


def gated_mlp(w: Widths, width: float, prefix: str) -> list[Operator]:
    """Return the operators of a gated MLP that is one fp8 operator."""
    up = matmul(f"{prefix}up{_INSIDE}", w.tokens, 2 * width, w.dim, w.size, precision="fp8")
    down = matmul(f"{prefix}down", w.tokens, w.dim, width, w.size, precision="fp8")
    weights = 3 * width * w.dim
    return [
        *_casts(w, w.tokens * w.dim, weights, is_fp8=True),
        up,
        moved(GATE, _GATE_BYTES * width * w.tokens),
        down,
    ]


GATE = "activation, cast to fp8"


def gate_gradient(gate: Operator) -> Operator:
    """Return the backward of the activation of a gated MLP that is one fp8 operator."""
    return moved(f"{GATE}, gradient", gate.bytes * _GATE_GRADIENT_BYTES / _GATE_BYTES)


def _casts(w: Widths, inputs: float, weights: float, *, is_fp8: bool) -> list[Operator]:
    if not is_fp8:
        return []
    # Two reads of a weight as it is stored, and two writes of 8 bits.
    traits = w.setting.traits
    stored = 4 if w.setting.casts and not traits.master_copy else 2
    each = 0 if traits.delayed_scales else 2 * stored + 2
    return [moved(CASTS, _cast_bytes(w) * inputs + each * weights)]


def _cast_bytes(w: Widths) -> float:
    """Traffic of casting a 16-bit number by rows and by columns, after a pass for the scale."""
    return 2 + 2 if w.setting.traits.delayed_scales else 2 + 2 + 2


def fp8_operators(w: Widths) -> tuple[int, int]:
    """Return how many linear layers and how many gated MLPs of a block are fp8 operators."""
    shapes = list(w.attention_matrices.values())
    fused = 0
    for width in _dense_widths(w):
        if mlp_is_one_operator(w, width):
            fused += 1
        else:
            shapes += _mlp_matrices(w, width)
    return sum(runs_in_fp8(w, rows, columns) for rows, columns in shapes), fused


def fp8_parameters(w: Widths) -> float:
    """Return the elements of a block's weights that are cast to fp8; the others are cast to 16 bits."""
    found = sum(rows * columns for rows, columns in w.attention_matrices.values() if runs_in_fp8(w, rows, columns))
    return found + sum(_fp8_of_mlp(w, width) for width in _dense_widths(w))


def fp8_parameters_of_mlp(w: Widths) -> float:
    """Return the elements of the MLP's or the shared expert's weights that are cast to fp8."""
    return sum(_fp8_of_mlp(w, width) for width in _dense_widths(w))


def _dense_widths(w: Widths) -> list[float]:
    return [w.inner] if w.moe is None else [w.shared] if w.shared else []


def _fp8_of_mlp(w: Widths, width: float) -> float:
    whole = mlp_is_one_operator(w, width)
    return sum(rows * columns for rows, columns in _mlp_matrices(w, width) if whole or runs_in_fp8(w, rows, columns))


def _mlp_matrices(w: Widths, width: float) -> list[tuple[float, float]]:
    """Return rows and columns of the matrices of a dense MLP: up, with its gate, and down."""
    return [(width * (2 if w.gated else 1), w.dim), (w.dim, width)]
