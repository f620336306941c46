"""Parameter groups by role: weight decay for matrices, none for vectors, a setting for embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

Params = Iterable[Tensor] | Iterable[dict[str, Any]]
Kind = Literal["matrix", "embedding", "output", "vector"]

_OUTPUT_NAMES = {"head", "lm_head", "embed_out", "output"}


def kind_of(name: str, parameter: nn.Parameter, module: nn.Module) -> Kind:
    """Return the role of a parameter, from its module and shape.

    A norm's scale and a bias are vectors; an embedding that is also the output layer counts as an embedding.
    """
    if isinstance(module, nn.Embedding):
        return "embedding"
    if parameter.dim() < 2:
        return "vector"
    return "output" if name.rpartition(".")[0].rpartition(".")[2] in _OUTPUT_NAMES else "matrix"


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    embedding_weight_decay: float | None = None,
    lr_scales: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Return groups for any torch optimizer: one per role and learning rate, in the order of the model.

    `lr_scales` multiplies the learning rate of single parameters (muP). Frozen parameters are excluded.

    >>> groups = parameter_groups(nn.Linear(2, 2), lr=1e-3)
    >>> [(group["kind"], group["weight_decay"], len(group["params"])) for group in groups]
    [('matrix', 0.1, 1), ('vector', 0.0, 1)]
    """
    decays: dict[str, float] = {
        "matrix": weight_decay,
        "output": weight_decay,
        "embedding": weight_decay if embedding_weight_decay is None else embedding_weight_decay,
        "vector": 0.0,
    }
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():  # a tied parameter occurs once, under its first name
        if not parameter.requires_grad:
            continue
        kind = kind_of(name, parameter, modules[name.rpartition(".")[0]])
        scaled = lr * (1.0 if lr_scales is None else lr_scales.get(name, 1.0))
        group = groups.setdefault(
            (kind, scaled), {"params": [], "lr": scaled, "weight_decay": decays[kind], "kind": kind}
        )
        group["params"].append(parameter)
    return list(groups.values())
