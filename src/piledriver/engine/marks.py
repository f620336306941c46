"""How to see that a model was laid out, without importing what lays it out."""

from __future__ import annotations

from torch import nn

LAID_OUT = "_laid_out"


def is_prepared(model: nn.Module) -> bool:
    """Whether the engine has done something to this model."""
    return model.__dict__.get(LAID_OUT) is not None


def is_on_meta(model: nn.Module) -> bool:
    """Whether a model has no memory yet."""
    return any(tensor.is_meta for tensor in model.parameters())
