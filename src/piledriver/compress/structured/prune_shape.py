"""Prune a model to a smaller shape: choose parts by importance, correct what stays, remove the rest."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from piledriver.compress.calibration import BlockWalk, Calibration, each_block
from piledriver.compress.structured.cut import KeptParts, cut
from piledriver.compress.structured.importance import (
    ModelScores,
    group_scores,
    largest,
    layer_losses,
    neuron_scores,
    score_model,
)
from piledriver.compress.structured.shape import SmallerShape
from piledriver.models import Transformer
from piledriver.models.config import ModelConfig
from piledriver.models.layers import Linear

LayerScore = Literal["influence", "loss"]


@torch.no_grad()
def prune_shape(
    model: Transformer,
    shape: SmallerShape,
    calibration: Calibration,
    *,
    layer_score: LayerScore = "influence",
    correct: bool = True,
    damping: float = 0.01,
    device: torch.device,
    batch_tokens: int = 8192,
    show_progress: bool = False,
) -> Transformer:
    """Return a plain smaller model; `model` is changed and must not be used again.

    Layers are chosen by block influence or by the loss without them, channels by their magnitude after the norms,
    groups of heads and neurons by what they add to the output, experts by their routing weight. With `correct`, the
    output projections of attention and MLP are refitted by least squares, so that the inputs that stay replace those
    that go. Blocks are treated in order, each with the inputs that the pruned ones before it give.
    """
    config = model.config
    shape.check(config)
    scores = score_model(BlockWalk(model, calibration, device=device, batch_tokens=batch_tokens), model)
    importance = list(scores.layers)
    if shape.layers is not None and layer_score == "loss":
        importance = layer_losses(model, calibration, batch_tokens=batch_tokens)
    layers = largest(importance, shape.layers or config.layers).tolist()
    channels = None
    if shape.dim is not None and shape.dim < config.dim:
        channels = largest(scores.channels, shape.dim)
        _rescale_norms(model, scores, channels)
    experts = {} if shape.experts is None else _experts(scores, shape.experts, config)
    model = cut(model, KeptParts(layers=layers, channels=channels, experts=experts))
    groups, neurons, errors = _narrow(model, shape, calibration, correct, damping, device, batch_tokens, show_progress)
    model = cut(model, KeptParts(groups=groups, neurons=neurons))
    model.compression.append(
        {
            "act": "prune",
            "method": "structured",
            "shape": {name: size for name, size in vars(shape).items() if size is not None},
            "calibration": dict(calibration.origin),
            "corrected": correct,
            "kept_layers": layers,
            "kept_channels": None if channels is None else channels.tolist(),
            "layer_score": layer_score,
            "layer_scores": importance,
            "relative_error": errors,
            "skipped": {},
        }
    )
    return model


def _experts(scores: ModelScores, count: int, config: ModelConfig) -> dict[int, Tensor]:
    """Return the experts to keep in each block, as many of each group."""
    assert config.moe is not None
    groups = config.moe.groups
    kept = {}
    for layer, weights in scores.experts.items():
        each = len(weights) // groups
        parts = [group * each + largest(part, count // groups) for group, part in enumerate(torch.split(weights, each))]
        kept[layer] = torch.cat(parts)
    return kept


def _rescale_norms(model: Transformer, scores: ModelScores, channels: Tensor) -> None:
    """Scale the weights of norms by how much the mean square of their input changes when channels go."""
    modules = dict(model.named_modules())
    for name, energy in scores.energies.items():
        norm: Any = modules[name]
        if norm.weight is None:
            continue
        factor = float((energy[channels].mean() / energy.mean().clamp(min=1e-30)).sqrt())
        offset = 1.0 if norm.offset else 0.0
        norm.weight.copy_((norm.weight + offset) * factor - offset)


def _narrow(
    model: Transformer,
    shape: SmallerShape,
    calibration: Calibration,
    correct: bool,
    damping: float,
    device: torch.device,
    batch_tokens: int,
    show_progress: bool,
) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[str, float]]:
    """Choose groups and neurons block by block, and set what goes to zero; return what stays and the errors."""
    groups: dict[int, Tensor] = {}
    neurons: dict[int, Tensor] = {}
    errors: dict[str, float] = {}
    config = model.config
    fewer_groups = shape.kv_heads is not None and shape.kv_heads < config.kv_heads
    fewer_neurons = shape.mlp_dim is not None and shape.mlp_dim < config.mlp_dim
    if not fewer_groups and not fewer_neurons:
        return groups, neurons, errors
    walk = BlockWalk(model, calibration, device=device, batch_tokens=batch_tokens)
    for name, block in each_block(model, "prune", show_progress):
        layer, home = int(name), next(block.parameters()).device
        if fewer_groups:
            out = cast(Linear, block.get_submodule("attention.out"))
            statistics = walk.statistics(name, block, {"out": out})["out"]
            groups[layer] = largest(group_scores(out.weight, statistics, config.kv_heads), shape.kv_heads or 0)
            width = out.in_features // config.kv_heads
            columns = (groups[layer][:, None] * width + torch.arange(width)).flatten()
            errors[f"blocks.{name}.attention.out"] = _remove_inputs(out, statistics.hessian, columns, correct, damping)
        if fewer_neurons and not config.has_experts(layer):
            down = cast(Linear, block.get_submodule("mlp.down"))
            statistics = walk.statistics(name, block, {"down": down})["down"]
            neurons[layer] = largest(neuron_scores(down.weight, statistics), shape.mlp_dim or 0)
            errors[f"blocks.{name}.mlp.down"] = _remove_inputs(
                down, statistics.hessian, neurons[layer], correct, damping
            )
        walk.advance(name, block)
        block.to(home)
    return groups, neurons, errors


def _remove_inputs(layer: Linear, hessian: Tensor, kept: Tensor, correct: bool, damping: float) -> float:
    """Set the columns of a weight that are not kept to zero and refit the others; return the relative squared error.

    Where the inputs that go are always zero, the others stay exactly as they are.
    """
    kept = kept.to(hessian.device)
    gone = torch.ones(layer.in_features, dtype=torch.bool, device=hessian.device)
    gone[kept] = False
    before, wide = layer.weight.detach().double(), hessian.double()
    after = before.masked_fill(gone, 0.0)
    if correct and bool(wide.diagonal()[gone].any()):
        inner = wide[kept][:, kept]
        inner.diagonal().add_(damping * inner.diagonal().mean())
        moved = before[:, gone] @ wide[gone][:, kept]
        after[:, kept] += torch.cholesky_solve(moved.t(), torch.linalg.cholesky(inner)).t()
    difference = after - before
    total = ((before @ wide) * before).sum().clamp(min=1e-30)
    layer.weight.copy_(after.to(layer.weight.dtype))
    return float(((difference @ wide) * difference).sum() / total)
