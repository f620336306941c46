"""Layers that follow rules of scheduled compression: they keep their parameters and their names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.compress.scheduled.fake_quantise import fake_quantise_groups, fake_quantise_tokens
from piledriver.compress.scheduled.rules import ActivationRule, MaskRule, WeightRule
from piledriver.core.errors import UsageError

Rule = WeightRule | ActivationRule | MaskRule
# Share of the old range that a running range keeps.
_MOMENTUM = 0.95


class ScheduledLayer(nn.Module):
    """A linear or convolution layer with rules; `schedule_step` is the training step that it is in."""

    weight: Tensor
    bias: Any

    def state(self) -> ScheduledState:
        """Return the rules and what belongs to them."""
        found: ScheduledState = self.__dict__["_scheduled"]
        return found

    def compressed_weight(self) -> Tensor:
        """Return the weight with all masks and rounding that have begun."""
        state, weight = self.state(), self.weight
        for index, rule in enumerate(state.rules):
            if isinstance(rule, MaskRule) and state.has_begun(rule):
                weight = weight * state.mask(self, index, rule)
        for rule in state.rules:
            if isinstance(rule, WeightRule) and state.has_begun(rule):
                bits = rule.bits_at(state.step)
                weight = fake_quantise_groups(weight, bits, rule.groups, symmetric=rule.symmetric)
        return weight

    def compressed_bias(self) -> Tensor | None:
        """Return the bias, zero where whole rows are."""
        state = self.state()
        bias: Tensor | None = self.bias
        for index, rule in enumerate(state.rules):
            of_rows = isinstance(rule, MaskRule) and rule.kind in ("rows", "channels")
            if bias is not None and of_rows and state.has_begun(rule):
                bias = bias * state.mask(self, index, cast(MaskRule, rule)).flatten()
        return bias

    def compressed_input(self, x: Tensor) -> Tensor:
        """Return the input, rounded where a rule asks for it."""
        state = self.state()
        for rule in state.rules:
            if isinstance(rule, ActivationRule) and state.has_begun(rule):
                limits = state.running_range(x, self.training) if rule.static else None
                x = fake_quantise_tokens(x, rule.bits, symmetric=rule.symmetric, limits=limits)
        return x


class ScheduledLinear(ScheduledLayer, nn.Linear):
    """A linear layer with rules."""

    def forward(self, input: Tensor) -> Tensor:
        """Return x @ weight.T + bias, all compressed."""
        return F.linear(self.compressed_input(input), self.compressed_weight(), self.compressed_bias())


class ScheduledConv2d(ScheduledLayer, nn.Conv2d):
    """A convolution with rules."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of the compressed input with the compressed weight."""
        x, weight, bias = self.compressed_input(input), self.compressed_weight(), self.compressed_bias()
        out: Tensor = self._conv_forward(x, weight, bias)
        return out


class ScheduledState:
    """The rules of a layer, the step, fixed masks and running ranges."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.step = 0
        self.range: Tensor | None = None
        self._fixed: dict[int, Tensor] = {}

    def has_begun(self, rule: Rule) -> bool:
        """Return whether a rule applies in this step."""
        return self.step >= rule.offset

    def mask(self, layer: ScheduledLayer, index: int, rule: MaskRule) -> Tensor:
        """Return a mask that broadcasts over the weight: fixed at its first use, or from learned scores."""
        if rule.method == "topk":
            scores: Tensor = getattr(layer, score_name(rule))
            hard = _kept(scores.detach(), rule.keep).to(scores.dtype)
            # The gradient of the mask is that of the scores.
            return _spread(hard + scores - scores.detach(), layer.weight, rule)
        if index not in self._fixed:
            self._fixed[index] = _kept(part_sizes(layer.weight.detach(), rule), rule.keep)
        return _spread(self._fixed[index].to(layer.weight.dtype), layer.weight, rule)

    @torch.no_grad()
    def running_range(self, x: Tensor, training: bool) -> Tensor:
        """Return (lowest, highest) of inputs so far, exponentially averaged."""
        now = torch.stack((x.detach().float().amin(), x.detach().float().amax()))
        if self.range is None:
            self.range = now
        elif training:
            self.range = _MOMENTUM * self.range + (1 - _MOMENTUM) * now
        return self.range


def attach_rule(layer: nn.Module, rule: Rule) -> None:
    """Make a layer follow a rule, in place; its class changes, its parameters stay."""
    if not isinstance(layer, ScheduledLayer):
        known: dict[type, type] = {nn.Linear: ScheduledLinear, nn.Conv2d: ScheduledConv2d}
        if type(layer) not in known:
            raise UsageError(f"{type(layer).__name__} cannot be compressed", fix="match nn.Linear or nn.Conv2d modules")
        layer.__class__ = known[type(layer)]
        layer.__dict__["_scheduled"] = ScheduledState()
    assert isinstance(layer, ScheduledLayer)
    layer.state().rules.append(rule)
    if isinstance(rule, MaskRule) and rule.method == "topk":
        sizes = part_sizes(layer.weight.detach(), rule)
        layer.register_parameter(score_name(rule), nn.Parameter(sizes / sizes.mean().clamp(min=1e-12)))


def scheduled_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers of a model that follow rules, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, ScheduledLayer))


def score_name(rule: MaskRule) -> str:
    """Return the name of the parameter that holds the learned scores of a rule."""
    return f"{rule.kind}_mask_scores"


def part_sizes(weight: Tensor, rule: MaskRule) -> Tensor:
    """Return the mean magnitude of each part that a rule may remove."""
    size = weight.float().abs()
    if rule.kind == "weights":
        return size
    if rule.kind == "heads":
        return torch.unflatten(size, 1, (rule.heads, -1)).mean(dim=(0, 2))
    return size.flatten(1).mean(dim=1)


def kept_parts(layer: ScheduledLayer, rule: MaskRule) -> Tensor:
    """Return the indices of the rows, channels or heads that stay, ascending."""
    state = layer.state()
    state.mask(layer, state.rules.index(rule), rule)
    if rule.method == "topk":
        kept = _kept(getattr(layer, score_name(rule)).detach(), rule.keep)
    else:
        kept = state._fixed[state.rules.index(rule)]
    return kept.nonzero()[:, 0]


def _kept(sizes: Tensor, keep: float) -> Tensor:
    """Return a mask of the share `keep` with the largest sizes; ties go to lower indices."""
    flat = sizes.flatten()
    count = max(1, math.floor(keep * flat.numel() + 0.5))
    mask = torch.zeros(flat.numel(), dtype=torch.bool, device=flat.device)
    mask[torch.argsort(flat, descending=True, stable=True)[:count]] = True
    return mask.view_as(sizes)


def _spread(mask: Tensor, weight: Tensor, rule: MaskRule) -> Tensor:
    if rule.kind == "weights":
        return mask
    if rule.kind == "heads":
        return mask.repeat_interleave(weight.shape[1] // rule.heads).unsqueeze(0)
    return mask.view(-1, *(1 for _ in weight.shape[1:]))
