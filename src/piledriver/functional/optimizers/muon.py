"""Muon: momentum whose matrices are made orthogonal before they are applied (Jordan et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from piledriver.functional.optimizers.groups import by_label
from piledriver.functional.optimizers.optimizers import (
    Optimizer,
    Rate,
    adamw,
    add_decayed_weights,
    chain,
    scale_by_rate,
    stateless,
    trace,
)
from piledriver.functional.surgery import not_vectors
from piledriver.functional.tree import Path
from piledriver.kernels.newton_schulz import orthogonalise


def muon(
    rate: Rate,
    *,
    adam_rate: Rate | None = None,
    momentum: float = 0.95,
    steps: int = 5,
    weight_decay: float = 0.0,
    stacked: int = 0,
    label: Callable[[Path, Tensor], str] | None = None,
) -> Optimizer:
    """Apply Muon to hidden matrices, AdamW (at `adam_rate`, else `rate`) to embeddings, vectors and the head.

    `stacked` is how many leading dimensions are a batch of matrices (1 for scanned layers). `label` decides otherwise
    than by name and shape which of the two, "muon" or "adamw", a parameter gets.
    """
    hidden = chain(
        trace(momentum, nesterov=True),
        orthogonalise_updates(steps, stacked),
        add_decayed_weights(weight_decay),
        scale_by_rate(rate),
    )
    others = adamw(rate if adam_rate is None else adam_rate, 0.9, 0.95, weight_decay=weight_decay, mask=not_vectors)
    return by_label({"muon": hidden, "adamw": others}, label or (lambda path, leaf: default_label(path, leaf, stacked)))


def orthogonalise_updates(steps: int = 5, stacked: int = 0) -> Optimizer:
    """Return an optimizer that replaces every update by its orthogonal factor (`orthogonal_update`)."""
    return stateless(lambda leaves: [orthogonal_update(leaf, steps, stacked) for leaf in leaves])


def default_label(path: Path, leaf: Tensor, stacked: int = 0) -> str:
    """Return "muon" for matrices that are neither an embedding nor a head, else "adamw"."""
    is_outer = any(name in ("embed", "embedding", "head") for name in path)
    return "adamw" if is_outer or leaf.ndim - stacked < 2 else "muon"


def orthogonal_update(update: Tensor, steps: int = 5, stacked: int = 0) -> Tensor:
    """Return the orthogonal factor of an update, scaled so that wide and tall matrices move alike.

    Tensors of more dimensions are split into inputs and outputs where that makes the squarest matrix: (dim, heads,
    head_dim) at its first dimension, (heads, head_dim, dim) at its last.
    """
    shape = update.shape
    own = shape[stacked:]
    cut = min(range(1, len(own)), key=lambda i: abs(math.log(math.prod(own[:i]) / math.prod(own[i:]))))
    matrix = update.reshape(*shape[:stacked], math.prod(own[:cut]), math.prod(own[cut:]))
    rows, columns = matrix.shape[-2:]
    turned = orthogonalise(matrix, steps=steps, dtype=torch.bfloat16 if update.is_cuda else torch.float32)
    made: Tensor = (turned * max(1.0, columns / rows) ** 0.5).reshape(shape).to(update.dtype)
    return made
