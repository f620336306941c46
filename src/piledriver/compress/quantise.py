"""`quantise`: store the weights of a model in 8 or 4 bits.

Blocks are treated in order. The inputs of a layer are those that the blocks before it produce once they are quantised,
so that later layers correct earlier errors.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from piledriver.compress.awq import output_error, round_clipped, search_scale
from piledriver.compress.calibration import BlockWalk, Calibration, LayerStatistics, each_block
from piledriver.compress.experts import quantise_experts
from piledriver.compress.gptq import gptq
from piledriver.compress.scaling import apply_scale, input_scales
from piledriver.compress.scheme import KEPT_DENSE, Scheme
from piledriver.compress.smoothquant import smoothing_scale
from piledriver.core.errors import UsageError
from piledriver.data import Cursor, TokenStream
from piledriver.kernels.linear import QuantisedWeight, WeightKind, dequantise_weight, quantise_weight
from piledriver.models import Transformer
from piledriver.models.block import Block
from piledriver.models.codes import QuantisedCodes
from piledriver.models.feed_forward.moe import Experts, MoE
from piledriver.models.layers import Linear
from piledriver.models.quantised import (
    DynamicQuantisedLinear,
    QuantisedLinear,
    check_vocabulary,
    quantise_embedding,
    quantise_head,
    replace_layer,
)

Method = Literal["rtn", "gptq", "awq", "smoothquant"]
METHODS: tuple[Method, ...] = ("rtn", "gptq", "awq", "smoothquant")
# Layers of a block in the order in which they compute; those of one row read the same input.
_ORDER = (
    ("attention.qkv", "attention.q_a", "attention.kv_a"),
    ("attention.q_b",),
    ("attention.out",),
    ("mlp.gate_up", "mlp.up", "shared_mlp.gate_up", "shared_mlp.up"),
    ("mlp.down", "shared_mlp.down"),
)
_EXPERTS = "experts are quantised by weights only, and this scheme rounds their inputs"


@torch.no_grad()
def quantise(
    model: Transformer,
    scheme: str | Scheme,
    *,
    method: Method = "rtn",
    data: Tensor | TokenStream | Calibration | None = None,
    samples: int = 128,
    cursor: Cursor | None = None,
    skip: Sequence[str] = (),
    keep_sensitive: int = 0,
    head: WeightKind | None = None,
    embedding: WeightKind | None = None,
    activation_order: bool = True,
    static_groups: bool = True,
    true_sequential: bool = True,
    damping: float = 0.01,
    smoothing: float = 0.5,
    device: torch.device | str | None = None,
    batch_tokens: int = 8192,
    in_place: bool = False,
    show_progress: bool = False,
) -> Transformer:
    """Return the model with quantised linear layers; it evaluates, serves and saves like any other.

    `scheme` is one of `compress.scheme.NAMES`. `method` is round-to-nearest, or one that calibrates on `samples`
    windows of `data` (token ids, or a `TokenStream` from `cursor` on): the same data give the same bits. `skip` holds
    patterns of layer names (`blocks.0.*`, `*.mlp.down`) that stay as they are; `keep_sensitive` is a number of layers
    with the largest relative error that stay too. `head` and `embedding` round the output projection and the embedding
    to int8 or fp8, with a scale for each token of the vocabulary; where they are tied, either rounds both.
    `activation_order`, `static_groups`, `true_sequential` and `damping` belong to GPTQ, `smoothing` to SmoothQuant.
    Blocks are moved to `device` one at a time and back; `batch_tokens` of the samples are computed at a time.

    What was done, with the error of each layer, is appended to `model.compression`.

    >>> from piledriver.models import ModelConfig
    >>> model = Transformer(ModelConfig(vocab_size=32, dim=32, layers=1, heads=2, mlp_dim=64))
    >>> small = quantise(model, "w4a16-g32", method="gptq", data=torch.randint(32, (4, 16)))
    >>> small(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 32])
    """
    scheme = Scheme.named(scheme) if isinstance(scheme, str) else scheme
    _check(model, scheme, method, data, keep_sensitive)
    check_vocabulary(model.config, head=head, embedding=embedding)
    calibration = None if data is None else Calibration.of(data, samples=samples, cursor=cursor)
    model = model if in_place else copy.deepcopy(model)
    place = torch.device(device) if device is not None else model.device
    skipped = _skipped(model, scheme, skip)
    if keep_sensitive:
        assert calibration is not None
        errors = sensitivity(model, scheme, calibration, device=place, batch_tokens=batch_tokens)
        worst = sorted((name for name in errors if name not in skipped), key=lambda name: (-errors[name], name))
        skipped |= {name: f"sensitive: relative error {errors[name]:.3g}" for name in worst[:keep_sensitive]}
    if not (head or embedding or set(_names(model)) - set(skipped)):
        raise UsageError(f"skip {list(skip)} leaves no layer to quantise", fix="skip fewer layers")
    work = _Quantiser(
        scheme,
        method,
        skipped,
        gptq_settings={
            "activation_order": activation_order,
            "static_groups": static_groups,
            "damping": damping,
        },
        smoothing=smoothing,
        sequential=true_sequential and method == "gptq",
    )
    ends = _quantise_vocabulary(model, head, embedding)
    walk = None if calibration is None else BlockWalk(model, calibration, device=place, batch_tokens=batch_tokens)
    for name, block in each_block(model, "quantise", show_progress):
        home = next(block.parameters()).device
        work.block(name, block, walk)
        block.to(home)
    model.requires_grad_(False)
    model.compression.append(
        {
            "act": "quantise",
            "scheme": scheme.name,
            "method": method,
            "head": head,
            "embedding": embedding,
            "calibration": None if calibration is None else dict(calibration.origin),
            "relative_error": work.layers | ends,
            "skipped": skipped,
        }
    )
    return model


@torch.no_grad()
def sensitivity(
    model: Transformer,
    scheme: str | Scheme,
    data: Tensor | TokenStream | Calibration,
    *,
    samples: int = 128,
    device: torch.device | str | None = None,
    batch_tokens: int = 8192,
) -> dict[str, float]:
    """Return the relative squared error of each layer's output if it alone is rounded to nearest."""
    scheme = Scheme.named(scheme) if isinstance(scheme, str) else scheme
    calibration = Calibration.of(data, samples=samples)
    walk = BlockWalk(model, calibration, device=device or model.device, batch_tokens=batch_tokens)
    errors: dict[str, float] = {}
    for name, block in model.blocks.items():
        home = next(block.parameters()).device
        layers = {key: layer for row in _ORDER for key, layer in _present(block, row)}
        for key, statistics in walk.statistics(name, block, layers).items():
            weight = layers[key].weight
            if _fits(weight, scheme):
                small = quantise_weight(weight, scheme.weights, group=scheme.group, symmetric=scheme.symmetric)
                errors[f"blocks.{name}.{key}"] = _relative_error(weight, small, statistics)
        walk.advance(name, block)
        block.to(home)
    return errors


class _Quantiser:
    """Quantises the layers of a block, and keeps their errors."""

    def __init__(
        self,
        scheme: Scheme,
        method: Method,
        skipped: dict[str, str],
        *,
        gptq_settings: dict[str, Any],
        smoothing: float,
        sequential: bool,
    ) -> None:
        self.scheme, self.method, self.skipped = scheme, method, skipped
        self.gptq_settings, self.smoothing, self.sequential = gptq_settings, smoothing, sequential
        self.layers: dict[str, float] = {}

    def block(self, name: str, block: Block, walk: BlockWalk | None) -> None:
        """Quantise a block; the walk then stands before the next one."""
        if walk is not None:
            block.to(walk.device)
        rows = _ORDER if self.sequential else (tuple(key for row in _ORDER for key in row),)
        for row in rows:
            layers = dict(_present(block, row))
            wanted = {key: layer for key, layer in layers.items() if f"blocks.{name}.{key}" not in self.skipped}
            if not wanted:
                continue
            known = {} if walk is None else walk.statistics(name, block, wanted)
            if self.method in ("awq", "smoothquant"):
                known = self._scale(block, wanted, known)
            for key, layer in wanted.items():
                full = f"blocks.{name}.{key}"
                small = self._round(layer.weight, known.get(key))
                self.layers[full] = _relative_error(layer.weight, small, known.get(key))
                made = self._layer(small, layer.bias)
                replace_layer(block, key, made)
                if walk is not None and self.sequential:
                    walk.reuse(made)
        if isinstance(block.mlp, MoE) and f"blocks.{name}.mlp.experts" not in self.skipped:
            settings = self.gptq_settings if self.method == "gptq" else None
            found = quantise_experts(name, block, self.scheme, walk, settings)
            self.layers |= {f"blocks.{name}.{key}": error for key, error in found.items()}
        if walk is not None:
            walk.advance(name, block)

    def _scale(
        self, block: Block, layers: dict[str, Linear], known: dict[str, LayerStatistics]
    ) -> dict[str, LayerStatistics]:
        """Scale input channels where the block allows it; return the statistics of the scaled inputs."""
        known = dict(known)
        for place in input_scales(block):
            if place.layer not in layers:
                continue
            weight, statistics = layers[place.layer].weight, known[place.layer]
            if self.method == "awq":
                scale, _ = search_scale(weight.float(), statistics, self.scheme)
            else:
                scale = smoothing_scale(weight, statistics, self.smoothing)
            scale = place.share(scale)
            apply_scale(block, place, scale)
            known[place.layer] = statistics.scaled(scale)
        return known

    def _round(self, weight: Tensor, statistics: LayerStatistics | None) -> QuantisedWeight:
        scheme = self.scheme
        if self.method == "gptq":
            assert statistics is not None
            return gptq(weight, statistics.hessian, scheme, **self.gptq_settings)
        if self.method == "awq":
            assert statistics is not None
            return round_clipped(weight.detach(), statistics.hessian, scheme)
        return quantise_weight(weight, scheme.weights, group=scheme.group, symmetric=scheme.symmetric)

    def _layer(self, small: QuantisedWeight, bias: Tensor | None) -> QuantisedLinear:
        return DynamicQuantisedLinear(small, bias) if self.scheme.dynamic else QuantisedLinear(small, bias)


def _check(model: Transformer, scheme: Scheme, method: str, data: object, keep_sensitive: int) -> None:
    if method not in METHODS:
        raise UsageError(f"no method {method!r}", fix=f"choose from {', '.join(METHODS)}")
    if data is None and (method != "rtn" or keep_sensitive):
        what = f"method {method!r}" if method != "rtn" else "keep_sensitive"
        raise UsageError(f"{what} needs calibration text", fix="give data=tokens, or a TokenStream")
    if method == "smoothquant" and not scheme.dynamic:
        raise UsageError(f"smoothquant with {scheme.name} does nothing useful", fix="use scheme w8a8 or w8a8-fp8")
    if any(isinstance(module, QuantisedCodes) for module in model.modules()):
        raise UsageError("the model is quantised already", fix="start from the dense model")


def _skipped(model: Transformer, scheme: Scheme, patterns: Iterable[str]) -> dict[str, str]:
    """Return the layers that a pattern names, with the reason; other layers must fit the scheme."""
    skipped: dict[str, str] = {}
    names = _names(model)
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise UsageError(f"skip pattern {pattern!r} matches no layer", fix=f"names are such as {names[0]}")
        skipped |= dict.fromkeys(found, f"matches {pattern}")
    for name, block in model.blocks.items():
        if isinstance(block.mlp, MoE):
            _check_experts(block.mlp.experts, f"blocks.{name}.mlp.experts", scheme, skipped)
        for key, layer in _linears(block):
            full = f"blocks.{name}.{key}"
            if key in KEPT_DENSE:
                skipped.setdefault(full, KEPT_DENSE[key])
            if full not in skipped and not _fits(layer.weight, scheme):
                raise UsageError(
                    f"{full} has {layer.in_features} columns, which {scheme.name} does not divide",
                    fix=f"use a smaller group, or skip=['*.{key}']",
                )
    return skipped


def _names(model: Transformer) -> list[str]:
    """Return the names of all layers that a scheme may round, and of those that stay dense in every model."""
    names = [f"blocks.{name}.{key}" for name, block in model.blocks.items() for key, _ in _linears(block)]
    return names + [f"blocks.{name}.mlp.experts" for name, block in model.blocks.items() if isinstance(block.mlp, MoE)]


def _check_experts(experts: Experts, full: str, scheme: Scheme, skipped: dict[str, str]) -> None:
    """Skip the experts of a block if the scheme rounds inputs; otherwise their columns must fit it."""
    if scheme.dynamic:
        skipped[full] = _EXPERTS
    for weight in (experts.gate_up, experts.down):
        if full not in skipped and not _fits(weight[0], scheme):
            raise UsageError(
                f"{full} has {weight.shape[2]} columns, which {scheme.name} does not divide",
                fix="use a smaller group, or skip=['*.experts']",
            )


def _fits(weight: Tensor, scheme: Scheme) -> bool:
    return scheme.fits(weight.shape[1])


def _linears(block: nn.Module) -> Iterator[tuple[str, Linear]]:
    return ((key, module) for key, module in block.named_modules() if isinstance(module, Linear))


def _present(block: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, Linear]]:
    return ((key, layer) for key, layer in _linears(block) if key in names)


def _relative_error(weight: Tensor, small: QuantisedWeight, statistics: LayerStatistics | None) -> float:
    """Return the squared error of the output relative to the output's, or of the weight where no input is known."""
    wide = weight.detach().float()
    difference = dequantise_weight(small, torch.float32) - wide
    if statistics is None:
        return float(difference.square().sum() / wide.square().sum().clamp(min=1e-30))
    hessian = statistics.hessian
    return output_error(difference, hessian) / max(output_error(wide, hessian), 1e-30)


def _quantise_vocabulary(model: Transformer, head: WeightKind | None, embedding: WeightKind | None) -> dict[str, float]:
    """Round the output projection and the embedding as asked; return their relative errors."""
    errors: dict[str, float] = {}
    if head is not None:
        weight = model.output_weight()
        errors["head"] = _relative_error(weight, quantise_head(model, head), None)
    if embedding is not None and not (model.config.tied and head is not None):
        weight = cast(Tensor, cast(nn.Module, model.embedding).weight)
        errors["embedding"] = _relative_error(weight, quantise_embedding(model, embedding), None)
    return errors
