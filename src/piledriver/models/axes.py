"""Logical axis names of every parameter's dimensions, from which the engine derives its sharding plans.

An axis name says what a dimension means (`vocab`, `embed`, `kv_heads`, ...); the engine decides which names to shard.
Fused projections are stored so that an even split of the named dimension is valid: rows of `qkv` are grouped by
key-value head, rows of `gate_up` alternate in blocks.
"""

from __future__ import annotations

from torch import nn

from piledriver.core.errors import UsageError

Axes = tuple[str, ...]

AXES: dict[str, dict[str, Axes]] = {
    "embedding": {"weight": ("vocab", "embed")},
    "position_embedding": {"weight": ("positions", "embed")},
    "head": {"weight": ("vocab", "embed")},
    "attention.qkv": {"weight": ("kv_heads", "embed"), "bias": ("kv_heads",)},
    "attention.out": {"weight": ("embed", "heads"), "bias": ("embed",)},
    "attention.q_norm": {"weight": ("heads_or_head_dim",)},
    "attention.k_norm": {"weight": ("kv_heads_or_head_dim",)},
    "mlp.gate_up": {"weight": ("mlp", "embed"), "bias": ("mlp",)},
    "mlp.up": {"weight": ("mlp", "embed"), "bias": ("mlp",)},
    "mlp.down": {"weight": ("embed", "mlp"), "bias": ("embed",)},
    "mlp.router.score": {"weight": ("router", "embed")},
    "mlp.experts": {"gate_up": ("experts", "mlp", "embed"), "down": ("experts", "embed", "mlp")},
    "attention_norm": {"weight": ("embed",), "bias": ("embed",)},
    "mlp_norm": {"weight": ("embed",), "bias": ("embed",)},
    "norm": {"weight": ("embed",), "bias": ("embed",)},
}


def axes_of(name: str) -> Axes:
    """Return the axes of one parameter of a `Transformer`, by its name.

    >>> axes_of("blocks.3.attention.qkv.weight")
    ('kv_heads', 'embed')
    """
    module, _, parameter = name.rpartition(".")
    parts = module.split(".")
    if parts[0] == "blocks":
        parts = parts[2:]
    try:
        return AXES[".".join(parts)][parameter]
    except KeyError:
        raise UsageError(f"{name!r} has no axis names", fix="add its module to AXES in models/axes.py") from None


def parameter_axes(model: nn.Module) -> dict[str, Axes]:
    """Return the axes of every parameter by name; those of QK-norm weights depend on what they span in this model."""
    axes = {name: axes_of(name) for name, _ in model.named_parameters()}
    config = getattr(model, "config", None)
    span_heads = getattr(config, "qk_norm", "head") == "full"
    for name, found in axes.items():
        if found[0].endswith("_or_head_dim"):
            axes[name] = (found[0].removesuffix("_or_head_dim") if span_heads else "head_dim",)
    return axes
