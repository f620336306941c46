"""Logical axis names of every parameter's dimensions, from which the engine derives its sharding plans.

An axis name says what a dimension means (`vocab`, `embed`, `kv_heads`, ...); the engine decides which names to shard.
Fused projections are stored so that an even split of the named dimension is valid: rows of `qkv` are grouped by
key-value head, rows of `gate_up` alternate in blocks.
"""

from __future__ import annotations

from torch import nn

from piledriver.core.errors import UsageError

Axes = tuple[str, ...]

_NORM: dict[str, Axes] = {"weight": ("embed",), "bias": ("embed",)}
_MLP: dict[str, dict[str, Axes]] = {
    "gate_up": {"weight": ("mlp", "embed"), "bias": ("mlp",)},
    "up": {"weight": ("mlp", "embed"), "bias": ("mlp",)},
    "down": {"weight": ("embed", "mlp"), "bias": ("embed",)},
    "xielu": dict.fromkeys(("alpha_p", "alpha_n", "beta", "eps"), ("activation",)),
}
AXES: dict[str, dict[str, Axes]] = {
    "embedding": {"weight": ("vocab", "embed")},
    "position_embedding": {"weight": ("positions", "embed")},
    "head": {"weight": ("vocab", "embed"), "bias": ("vocab",)},
    "attention": {"sinks": ("heads",)},
    "attention.qkv": {"weight": ("kv_heads", "embed"), "bias": ("kv_heads",)},
    "attention.out": {"weight": ("embed", "heads"), "bias": ("embed",)},
    "attention.q_norm": {"weight": ("heads_or_head_dim",), "bias": ("heads_or_head_dim",)},
    "attention.k_norm": {"weight": ("kv_heads_or_head_dim",), "bias": ("kv_heads_or_head_dim",)},
    "attention.q_a": {"weight": ("latent", "embed"), "bias": ("latent",)},
    "attention.q_a_norm": {"weight": ("latent",)},
    "attention.q_b": {"weight": ("heads", "latent")},
    "attention.kv_a": {"weight": ("latent", "embed"), "bias": ("latent",)},
    "attention.kv_a_norm": {"weight": ("latent",)},
    "attention.kv_b": {"weight": ("heads", "latent")},
    **{f"{mlp}.{name}": axes for mlp in ("mlp", "shared_mlp") for name, axes in _MLP.items()},
    "shared_gate": {"weight": ("gate", "embed")},
    "mlp": {"down_bias": ("router", "embed")},
    "mlp.router": {"correction_bias": ("router",)},
    "mlp.router.score": {"weight": ("router", "embed"), "bias": ("router",)},
    "mlp.experts": {
        "gate_up": ("experts", "mlp", "embed"),
        "down": ("experts", "embed", "mlp"),
        "gate_up_bias": ("experts", "mlp"),
    },
    "attention_norm": _NORM,
    "attention_post_norm": _NORM,
    "mlp_norm": _NORM,
    "mlp_post_norm": _NORM,
    "embedding_norm": _NORM,
    "norm": _NORM,
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
    kind = getattr(getattr(model, "config", None), "qk_norm", "head")
    for name, found in axes.items():
        if found[0].endswith("_or_head_dim"):
            heads = found[0].removesuffix("_or_head_dim")
            axes[name] = {"head": ("head_dim",), "per_head": (heads, "head_dim")}.get(kind, (heads,))
    return axes
