"""The cost of attention with its norm and residual: operators, and tensors kept for the backward."""

from __future__ import annotations

from piledriver.plan.blocks.fp8 import keeps_columns, linear_operators, runs_in_fp8
from piledriver.plan.blocks.operators import Kept, Operator, matmul, moved
from piledriver.plan.blocks.widths import Widths

# Traffic of an element of attention's output in one step of a ring.
_RING_BYTES = 30


def attention_operators(w: Widths) -> list[Operator]:
    """Return the operators of attention, its norm and residual."""
    config, dropout = w.config, w.setting.traits.dropout
    found = [w.move("norm", 2 * w.stream), *(_projections(w) if config.latent is None else _latent_projections(w))]
    if w.setting.traits.flash_attention:
        flops = 2.0 * w.tokens * w.context * (w.q + w.attended) * w.mask_cost
        shape = (round(w.tokens), round(w.context), config.head_dim)
        wide = w.q + w.attended + (2 * w.kv if config.latent is None else w.q + w.attended)
        found.append(Operator("attention", "attention", flops, wide * w.tokens * w.size, shape))
        if w.setting.cp > 1 and not w.setting.ulysses:
            # Each step of a ring adds a partial output to the sum in fp32, weighed by both normalisers, eagerly.
            found.append(moved("sum of partial outputs", _RING_BYTES * (w.setting.cp - 1) * w.attended * w.tokens))
    else:
        found += _scores(w)
    found += linear_operators(w, "out", w.dim, w.attended)
    found.append(w.move("residual", (3 + 2 * dropout) * w.stream))
    return found


def _projections(w: Widths) -> list[Operator]:
    config, width = w.config, w.q + 2 * w.kv
    found = linear_operators(w, "qkv", width, w.dim)
    if config.positions == "rotary" or config.qk_norm != "none":
        # Eager rotations run in fp32, operator by operator.
        found.append(w.move("rotary", (5 if w.eager else 2) * width))
    if config.qk_norm != "none":
        found.append(w.move("norms of queries and keys", 8 * (w.q + w.kv)))
    return found


def _latent_projections(w: Widths) -> list[Operator]:
    """Latent attention: down to the latent vectors on the residual stream, up to this rank's heads."""
    latent, matrices = w.config.latent, w.attention_matrices
    assert latent is not None
    rows = w.tokens * w.stream / w.dim
    found = []
    if latent.q_rank is not None:
        found += linear_operators(w, "query latent", *matrices["query latent"], tokens=rows)
        found.append(w.move("norm of the query latent", 2 * latent.q_rank))
    return [
        *found,
        *linear_operators(w, "queries", *matrices["queries"]),
        *linear_operators(w, "key-value latent", *matrices["key-value latent"], tokens=rows),
        w.move("norm of the key-value latent", 2 * latent.kv_rank),
        *linear_operators(w, "keys and values", *matrices["keys and values"]),
        w.move("rotary", (5 if w.eager else 2) * (w.q + latent.rope_dim)),
        w.move("keys with the shared part", 2 * w.q),
    ]


def _scores(w: Widths) -> list[Operator]:
    """Attention that stores its scores: two batched products, and softmax with mask (and dropout) between."""
    groups = max(1, round(w.setting.sequences * w.heads))
    length = w.setting.length
    scores = w.heads * length * w.tokens * w.size
    passes = 2 + 2.5 * w.setting.traits.dropout
    return [
        matmul("scores", length, length, w.config.head_dim, w.size, groups=groups),
        moved("softmax", passes * scores),
        matmul("weighted values", length, w.config.head_dim, length, w.size, groups=groups),
    ]


def kept_by_attention(w: Widths) -> list[Kept]:
    """Return what attention keeps for the backward."""
    config, traits = w.config, w.setting.traits
    found = [w.norm_input("block input")] if config.norm_placement != "post" else []
    found += _kept_projections(w) if config.latent is None else _kept_latents(w)
    if traits.flash_attention:
        found.append(w.keep("log-sum-exp", w.heads, 4))
    else:
        found.append(w.keep("scores", (2 if traits.dropout else 1) * w.heads * w.setting.length))
        if traits.dropout:
            found.append(w.keep("score dropout masks", w.heads * w.setting.length, 1))
    found.append(w.keep("attention output", w.attended))
    if keeps_columns(w, *w.attention_matrices["out"]) and traits.name == "piledriver":
        found.append(w.keep("attention output in fp8", w.attended, 1))
    if config.norm_placement == "post":
        found.append(w.norm_input("attention output before its norm"))
    if traits.dropout:
        found.append(w.keep("dropout masks", 2 * w.stream, 1))
    return [*found, *w.kept_weights("attention weights", w.attention_parameters, _fp8_parameters(w))]


def _fp8_parameters(w: Widths) -> float:
    return sum(rows * columns for rows, columns in w.attention_matrices.values() if runs_in_fp8(w, rows, columns))


def _kept_projections(w: Widths) -> list[Kept]:
    config = w.config
    found = w.linear_input("attention input", fp8=keeps_columns(w, *w.attention_matrices["qkv"]))
    if config.qk_norm != "none":
        # Cast to the dtype of the norms' weights.
        wide = 4 if w.setting.precision not in ("bf16-pure", "fp8-pure") else None
        found.append(w.keep("queries and keys before their norm", w.q + w.kv, wide))
    elif config.positions != "rotary" and w.setting.traits.name == "piledriver":
        # Without a rotation queries and keys are views of the projection, beside which values are copied.
        found.append(w.keep("values, copied", w.kv))
    return [*found, w.keep("queries, keys, values", w.q + 2 * w.kv)]


def _kept_latents(w: Widths) -> list[Kept]:
    """Latent vectors before and after their norms, then queries, keys and values of this rank's heads."""
    latent, share = w.config.latent, w.stream / w.dim
    assert latent is not None
    matrices = w.attention_matrices
    inputs = [matrices["query latent" if latent.q_rank is not None else "queries"], matrices["key-value latent"]]
    in_fp8 = [keeps_columns(w, *one) for one in inputs]
    # In 8 bits for each product in fp8, in 16 bits for the others.
    found = [] if all(in_fp8) else w.linear_input("attention input", w.stream)
    found += [one for small in in_fp8 if small for one in w.linear_input("attention input in fp8", w.stream, fp8=True)]
    # Norms with fp32 weights keep their input cast, unless they are compiled.
    wide = 4 if not w.setting.compiled and w.setting.casts else None
    if latent.q_rank is not None:
        found.append(w.keep("query latent before its norm", latent.q_rank * share, wide))
        found += w.linear_input("query latent", latent.q_rank, fp8=keeps_columns(w, *matrices["queries"]))
    found.append(w.keep("key-value latent before its norm", (latent.kv_rank + latent.rope_dim) * share, wide))
    found += w.linear_input("key-value latent", latent.kv_rank, fp8=keeps_columns(w, *matrices["keys and values"]))
    # Values are a view of the expanded latent, which is kept whole.
    expanded = w.q + w.attended - w.heads * latent.rope_dim
    return [*found, w.keep("queries, keys, values", 2 * w.q + expanded)]


def kept_products_of_attention(w: Widths) -> list[Kept]:
    """Return what selective checkpointing keeps of attention: outputs of products, of attention itself."""
    latent = w.config.latent
    wide = w.q + 2 * w.kv
    if latent is not None:
        down = (latent.q_rank or 0) + latent.kv_rank + latent.rope_dim
        wide = w.q + w.q + w.attended - w.heads * latent.rope_dim + down * w.stream / w.dim
    columns = sum(size[1] for size in w.attention_matrices.values() if keeps_columns(w, *size))
    small = [w.keep("inputs in fp8", columns, 1)] if columns and w.setting.traits.name == "piledriver" else []
    return [
        w.keep("block input", w.stream),
        w.keep("queries, keys, values", wide),
        w.keep("attention output", w.attended),
        w.keep("log-sum-exp", w.heads, 4),
        w.keep("attention projection", w.stream),
        *small,
        *w.fp8_weights("attention weights", _fp8_parameters(w)),
    ]
