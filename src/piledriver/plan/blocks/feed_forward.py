"""The cost of the MLP, or of a mixture of experts with its shared expert: operators, and tensors kept."""

from __future__ import annotations

import math

from piledriver.plan.blocks.fp8 import (
    fp8_parameters_of_mlp,
    gated_mlp,
    keeps_columns,
    linear_operators,
    mlp_is_one_operator,
)
from piledriver.plan.blocks.operators import Kept, Operator, matmul, moved
from piledriver.plan.blocks.widths import Widths

# Traffic of gathers and scatters of rows relative to a copy, compiled and eager; and of eager gates of experts, which
# lie in blocks of columns.
_INDEXED_PASSES, _EAGER_INDEXED_PASSES, _EAGER_GATES = 2.5, 3.5, 1.7


def mlp_operators(w: Widths) -> list[Operator]:
    """Return the operators of the MLP or of the experts, their norm and residual."""
    dropout = w.setting.traits.dropout
    inside = _dense(w, w.inner, "") if w.moe is None else _experts(w)
    return [w.move("norm", 2 * w.stream), *inside, w.move("residual", (3 + 2 * dropout) * w.stream)]


def _dense(w: Widths, width: float, prefix: str) -> list[Operator]:
    if mlp_is_one_operator(w, width):
        return gated_mlp(w, width, prefix)
    rows = width * (2 if w.gated else 1)
    return [
        *linear_operators(w, f"{prefix}up", rows, w.dim),
        w.move("activation", rows + width),
        *linear_operators(w, f"{prefix}down", w.dim, width),
    ]


def _experts(w: Widths) -> list[Operator]:
    """Router, dispatch and experts; a shared expert runs beside them."""
    moe = w.moe
    assert moe is not None
    chosen, rows = moe.experts_per_token, w.expert_rows
    local = max(1, moe.experts // w.setting.ep)
    each = 16 * math.ceil(rows / local / 16)  # grouped products pad their rows
    width = w.inner * (2 if w.gated else 1)
    found = [
        matmul("router", w.tokens, moe.experts, w.dim, w.size),
        moved("routing", w.tokens * moe.experts * 4 * 6 + rows * 8 * 8),
        _indexed(w, "dispatch", 4 * chosen * w.dim),
        matmul("experts up", each, width, w.dim, w.size, groups=local),
        w.move("activation", chosen * (width + w.inner) * (_EAGER_GATES if w.eager and w.gated else 1.0)),
        matmul("experts down", each, w.dim, w.inner, w.size, groups=local),
        _indexed(w, "combine", (2 * chosen + 1) * w.dim),
    ]
    if w.shared:
        found += [*_dense(w, w.shared, "shared expert "), w.move("sum with the shared expert", 3 * w.dim)]
    return found


def _indexed(w: Widths, name: str, elements: float) -> Operator:
    """Return a kernel that reads or writes rows by index, which compiling does not fuse."""
    passes = _EAGER_INDEXED_PASSES if w.eager else _INDEXED_PASSES
    return moved(name, elements * w.tokens * w.size * max(w.passes, passes))


def kept_by_mlp(w: Widths) -> list[Kept]:
    """Return what the MLP or the experts keep for the backward."""
    config, setting = w.config, w.setting
    found = []
    if config.norm_placement == "pre" and not config.parallel_residual:
        found.append(w.norm_input("middle of the block"))
    elif config.parallel_residual and not setting.compiled and setting.casts:
        found.append(w.norm_input("block input, cast again"))
    rows = (w.inner * (2 if w.gated else 1), w.dim)
    small = w.moe is None and (mlp_is_one_operator(w, w.inner) or keeps_columns(w, *rows))
    found += w.linear_input("MLP input", fp8=small)
    if w.moe is not None:
        found += _kept_by_experts(w)
    else:
        found += _kept_inside(w, w.inner, "MLP")
    if config.norm_placement == "post":
        found.append(w.norm_input("MLP output before its norm"))
    name = "MLP weights" if w.moe is None else "expert weights"
    return [*found, *w.kept_weights(name, w.mlp_parameters, fp8_parameters_of_mlp(w))]


def _kept_inside(w: Widths, width: float, name: str) -> list[Kept]:
    """What an MLP of this width keeps between its two products."""
    down = keeps_columns(w, w.dim, width)
    if mlp_is_one_operator(w, width) or (w.fuses_gate and not down):
        return [w.keep(f"gate and up of the {name}", 2 * width)]
    if w.gated:
        inputs = w.keep(f"gate and up of the {name}", (2 if w.setting.compiled else 3) * width)
        return [inputs, w.keep(f"gated product of the {name}", width)]
    return [w.keep(f"{name} before its activation", width), w.keep(f"{name} activation", width)]


def _kept_by_experts(w: Widths) -> list[Kept]:
    moe = w.moe
    assert moe is not None
    rows = w.expert_rows / w.tokens
    width = w.inner * (2 if w.gated else 1)
    found = []
    if w.gated and not w.setting.compiled:
        found.append(w.keep("activated gates of experts", rows * w.inner))
    found += [
        w.keep("router probabilities", 2 * moe.experts, 4),
        w.keep("routing", 4 * moe.experts_per_token, 8),
        w.keep("tokens by expert", rows * w.dim),
        w.keep("experts before their activation", rows * width),
        w.keep("expert activations", rows * w.inner),
        w.keep("expert outputs", (rows + moe.experts_per_token) * w.dim),
    ]
    if w.shared:
        found += _kept_inside(w, w.shared, "shared expert")
        if moe.shared_gate:
            found.append(w.keep("shared expert output", w.dim))
    return found


def kept_products_of_mlp(w: Widths) -> list[Kept]:
    """Return what selective checkpointing keeps of the MLP or the experts: outputs of products."""
    rows = 2 if w.gated else 1
    if w.moe is not None:
        expert = w.expert_rows / w.tokens
        found = [w.keep("experts up", expert * rows * w.inner), w.keep("experts down", expert * w.dim)]
        if w.shared:
            found.append(w.keep("shared expert up", rows * w.shared))
        if w.shared and not w.setting.compiled:
            found.append(w.keep("shared expert output", w.stream))
        return found
    found = [w.keep("MLP before its activation", rows * w.inner)]
    if not w.setting.compiled:
        found.append(w.keep("MLP output", w.stream))
    return found
