"""Scores of the parts of a model, from one forward pass over calibration text (Muralidharan et al., Minitron, 2024)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.compress.calibration import BlockWalk, Calibration, LayerStatistics
from piledriver.models import Transformer, make_masks
from piledriver.models.feed_forward.moe import MoE, Routing


class ModelScores(NamedTuple):
    """Scores of layers, channels and experts; small ones are removed first."""

    layers: list[float]
    """Block influence of each block: one minus the mean cosine of its input and output (Men et al., ShortGPT, 2024)."""
    channels: Tensor
    """Mean magnitude of each channel after the norms, summed over all norms."""
    energies: dict[str, Tensor]
    """Mean square of each channel of a norm's input, by the name of the norm."""
    experts: dict[int, Tensor]
    """Mean routing weight of each expert, by block."""


class _NormInputs:
    def __init__(self, dim: int, device: torch.device) -> None:
        self.rows = 0
        self.squares = torch.zeros(dim, dtype=torch.float64, device=device)
        self.magnitudes = torch.zeros(dim, dtype=torch.float64, device=device)

    def add(self, x: Tensor, out: Tensor) -> None:
        self.rows += x.shape[:-1].numel()
        self.squares += x.flatten(0, -2).double().square().sum(dim=0)
        self.magnitudes += out.flatten(0, -2).double().abs().sum(dim=0)


@torch.no_grad()
def score_model(walk: BlockWalk, model: Transformer) -> ModelScores:
    """Run all blocks over the samples of a walk, which then stands at the end, and return the scores."""
    layers: list[float] = []
    norms: dict[str, _NormInputs] = {}
    experts: dict[int, Tensor] = {}
    for name, block in model.blocks.items():
        home = next(block.parameters()).device
        handles = _watch_norms(norms, f"blocks.{name}.", block, model.config.dim, walk.device)
        if isinstance(block.mlp, MoE):
            total = experts[int(name)] = torch.zeros(block.mlp.router.settings.experts, device=walk.device)
            handles.append(block.mlp.router.register_forward_hook(_routing_hook(total)))
        cosine, rows, states = 0.0, 0, []
        for x, out in walk.outputs(name, block):
            cosine += float(F.cosine_similarity(x.double(), out.double(), dim=-1).sum())
            rows += x.shape[:-1].numel()
            states.append(out.cpu())
        walk.states = states
        for handle in handles:
            handle.remove()
        layers.append(1.0 - cosine / rows)
        block.to(home)
    if isinstance(model.norm, nn.Module):
        last = norms["norm"] = _NormInputs(model.config.dim, walk.device)
        where = next((parameter.device for parameter in model.norm.parameters()), walk.device)
        for state in walk.states:
            last.add(state.to(walk.device), model.norm(state.to(where)).to(walk.device))
    channels = torch.zeros(model.config.dim, dtype=torch.float64, device=walk.device)
    for found in norms.values():
        channels += found.magnitudes / max(found.rows, 1)
    energies = {name: (found.squares / max(found.rows, 1)).cpu() for name, found in norms.items()}
    return ModelScores(layers, channels.cpu(), energies, {layer: total.cpu() for layer, total in experts.items()})


def _watch_norms(
    found: dict[str, _NormInputs], prefix: str, block: nn.Module, dim: int, device: torch.device
) -> list[Any]:
    handles = []
    for key in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"):
        norm = getattr(block, key)
        if norm is not None:
            sums = found[prefix + key] = _NormInputs(dim, device)
            handles.append(norm.register_forward_hook(_norm_hook(sums)))
    return handles


def _norm_hook(sums: _NormInputs) -> Any:
    return lambda module, inputs, output: sums.add(inputs[0], output)


def _routing_hook(total: Tensor) -> Any:
    def add(module: nn.Module, inputs: Any, output: Routing) -> None:
        total.scatter_add_(0, output.experts.flatten(), output.weights.flatten().float())

    return add


def neuron_scores(weight: Tensor, statistics: LayerStatistics) -> Tensor:
    """Return the mean square that each input channel of a linear layer adds to its output, on its own."""
    return statistics.hessian.diagonal() * weight.detach().float().square().sum(dim=0)


def group_scores(weight: Tensor, statistics: LayerStatistics, groups: int) -> Tensor:
    """Return the mean square that each of equal runs of input channels adds to a layer's output, on its own."""
    width = weight.shape[1] // groups
    hessian = statistics.hessian
    scores = []
    for group in range(groups):
        part = slice(group * width, (group + 1) * width)
        wide = weight[:, part].detach().float()
        scores.append(((wide @ hessian[part, part]) * wide).sum())
    return torch.stack(scores)


@torch.no_grad()
def layer_losses(model: Transformer, calibration: Calibration, *, batch_tokens: int = 8192) -> list[float]:
    """Return the loss on calibration text, in nats per token, without each block in turn."""
    blocks, losses = model.blocks, []
    try:
        for name in blocks:
            model.blocks = nn.ModuleDict({other: block for other, block in blocks.items() if other != name})
            losses.append(calibration_loss(model, calibration, batch_tokens))
    finally:
        model.blocks = blocks
    return losses


@torch.no_grad()
def calibration_loss(model: Transformer, calibration: Calibration, batch_tokens: int = 8192) -> float:
    """Return the loss of a model on calibration text, in nats per token."""
    tokens, ids = calibration.tokens, calibration.document_ids
    place = model.device
    rows = max(1, batch_tokens // tokens.shape[1])
    nats, count = 0.0, 0
    for first in range(0, len(tokens), rows):
        part = tokens[first : first + rows].to(place)
        masks = None
        if ids is not None:
            some = ids[first : first + rows, :-1].to(place)
            masks = make_masks(model.config, some.shape[1], place, some, kernel=model.attention_kernel)
        sums = model(part[:, :-1], targets=part[:, 1:], masks=masks)
        nats, count = nats + float(sums.cross_entropy), count + int(sums.tokens)
    return nats / max(count, 1)


def largest(scores: Tensor | Iterable[float], count: int) -> Tensor:
    """Return the indices of the largest scores, ascending; ties go to lower indices.

    >>> largest([1.0, 3.0, 2.0, 3.0], 2)
    tensor([1, 3])
    """
    values = scores if isinstance(scores, Tensor) else torch.tensor(list(scores), dtype=torch.float64)
    order = torch.argsort(values.cpu(), descending=True, stable=True)
    return order[:count].sort().values
