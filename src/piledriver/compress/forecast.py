"""`compress.plan`: the size and decoding speed that compression would give, before anything runs."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from piledriver.compress.scheme import NAMES, Scheme
from piledriver.compress.structured.shape import SmallerShape
from piledriver.core.errors import UsageError
from piledriver.kernels.linear import WeightKind
from piledriver.models.config import ModelConfig
from piledriver.models.model_size import (
    active_parameter_count,
    cache_bytes_per_token,
    flops_per_token,
    parameter_count,
)
from piledriver.models.quantised import check_vocabulary
from piledriver.plan.hardware.cluster import Cluster
from piledriver.plan.hardware.parse import parse_hardware
from piledriver.plan.model_config import config_of

BATCHES = (1, 32)
"""Batch sizes whose decoding speed is shown."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Size and predicted decoding speed of a model."""

    parameters: int
    weight_bytes: int
    """Bytes of all weights, with the scales of quantised ones."""
    cache_bytes_per_token: int
    tokens_per_second: dict[int, float]
    """By batch size, at the memory and compute rates of the hardware."""


@dataclass(frozen=True, kw_only=True)
class CompressionPlan:
    """What would be done, and the model before and after it."""

    name: str
    hardware: str
    length: int
    """Tokens of context at which the speed is predicted."""
    shape: SmallerShape | None
    scheme: str | None
    head: str | None
    embedding: str | None
    config: ModelConfig
    """Config of the smaller model."""
    before: Footprint
    after: Footprint

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        return {
            "model": self.name,
            "hardware": self.hardware,
            "length": self.length,
            "shape": None if self.shape is None else {k: v for k, v in vars(self.shape).items() if v is not None},
            "scheme": self.scheme,
            "head": self.head,
            "embedding": self.embedding,
            "before": asdict(self.before),
            "after": asdict(self.after),
        }

    def as_text(self) -> str:
        """Return the plan as a table for the terminal."""
        rows: list[tuple[str, float, float, str]] = [
            ("parameters (M)", self.before.parameters / 1e6, self.after.parameters / 1e6, ".1f"),
            ("weights (MB)", self.before.weight_bytes / 1e6, self.after.weight_bytes / 1e6, ".1f"),
            (
                "cache a token (KB)",
                self.before.cache_bytes_per_token / 1e3,
                self.after.cache_bytes_per_token / 1e3,
                ".1f",
            ),
        ]
        rows += [
            (
                f"most tokens/s, {batch}",
                self.before.tokens_per_second[batch],
                self.after.tokens_per_second[batch],
                ",.0f",
            )
            for batch in BATCHES
        ]
        head = f"{self.name} on {self.hardware}, predicted for {self.length} tokens of context"
        lines = [head, f"{'':<22}{'before':>12}{'after':>12}{'ratio':>8}"]
        for what, old, new, form in rows:
            lines.append(f"{what:<22}{format(old, form):>12}{format(new, form):>12}{new / old:>8.2f}")
        if self.shape is not None:
            sizes = ", ".join(f"{name} {size}" for name, size in vars(self.shape).items() if size is not None)
            lines.append(f"keeps {sizes}")
        lines.append(
            "Most tokens/s of 1 and 32 sequences: weights and cache are read, products computed, nothing else."
        )
        return "\n".join(lines)


def plan_compression(
    model: Any,
    to: str | SmallerShape,
    *,
    head: WeightKind | None = None,
    embedding: WeightKind | None = None,
    hardware: str | Cluster = "here",
    length: int = 512,
) -> CompressionPlan:
    """Return what a compression would give; nothing is loaded or run.

    `model` is a `Transformer`, a `ModelConfig`, a preset or a model folder. `to` is a scheme (`w4a16-g128`), a share of
    the block parameters to keep (`params:0.7`, split over MLP and attention), both joined by `+`, or a `SmallerShape`.
    `head` and `embedding` are those of `quantise`. Speeds follow from the bytes that a step of decoding reads and the
    products that it computes.

    >>> made = plan_compression("llama-3-8b", "params:0.7+w4a16-g128", hardware="1xh100-80g")
    >>> made.after.weight_bytes < 0.3 * made.before.weight_bytes
    True
    >>> made.after.tokens_per_second[1] > made.before.tokens_per_second[1]
    True
    """
    if length < 1:
        raise UsageError(f"length is {length}", fix="give 1 or more tokens of context")
    config, name = config_of(model)
    shape, scheme = (to, None) if isinstance(to, SmallerShape) else _parse(to, config)
    check_vocabulary(config, head=head, embedding=embedding)
    small = config
    if shape is not None:
        shape.check(config)
        layers = range(shape.layers or config.layers)
        small = shape.config_of(config, kept_layers=list(layers))
    cluster = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    return CompressionPlan(
        name=name,
        hardware=cluster.name,
        length=length,
        shape=shape,
        scheme=None if scheme is None else scheme.name,
        head=head,
        embedding=embedding,
        config=small,
        before=_footprint(config, None, cluster, length),
        after=_footprint(small, scheme, cluster, length, head=head, embedding=embedding),
    )


def _parse(to: str, config: ModelConfig) -> tuple[SmallerShape | None, Scheme | None]:
    shape, scheme = None, None
    for part in to.split("+"):
        share = re.fullmatch(r"params:(0?\.\d+|1\.0)", part)
        if share is not None:
            shape = narrower_shape(config, float(share[1]))
        elif part in NAMES:
            scheme = Scheme.named(part)
        else:
            raise UsageError(f"{part!r} is no compression", fix="use params:0.7, a scheme such as w4a16-g128, or both")
    return shape, scheme


def narrower_shape(config: ModelConfig, share: float) -> SmallerShape:
    """Return a shape with at most this share of the block parameters: fewer neurons first, then fewer heads.

    Neurons matter less than heads (Muralidharan et al., Minitron, 2024): all heads stay while half of the neurons do.
    Below that, both lose parts; shares that half of the neurons do not allow keep that share of the heads.

    >>> narrower_shape(ModelConfig(vocab_size=32, dim=768, layers=2, heads=12, mlp_dim=2048), 0.7)
    SmallerShape(layers=None, dim=None, kv_heads=None, mlp_dim=1120, experts=None)
    >>> narrower_shape(ModelConfig(vocab_size=32, dim=768, layers=2, heads=12, mlp_dim=2048), 0.5)
    SmallerShape(layers=None, dim=None, kv_heads=5, mlp_dim=1088, experts=None)
    """
    if config.moe is not None:
        raise UsageError("params with experts", fix="give a SmallerShape with experts")
    keeps_heads = config.positions == "alibi" or config.qk_norm == "full"
    for kv_heads in range(config.kv_heads, 0 if not keeps_heads else config.kv_heads - 1, -1):
        width = _widest(config, kv_heads, share)
        if width is not None and 2 * width >= config.mlp_dim:
            break
    else:
        kv_heads = config.kv_heads if keeps_heads else max(1, round(config.kv_heads * share))
        width = _widest(config, kv_heads, share)
    if width is None:
        raise UsageError(f"{share:.0%} of the parameters is less than attention alone has", fix="remove layers too")
    return SmallerShape(kv_heads=None if kv_heads == config.kv_heads else kv_heads, mlp_dim=width)


def _widest(config: ModelConfig, kv_heads: int, share: float) -> int | None:
    """Return the largest MLP that a share of the block parameters allows with this many heads, or None."""
    smaller = SmallerShape(kv_heads=kv_heads).config_of(config, kept_layers=range(config.layers))
    # Widths that kernels tile evenly, and groups of int4 divide, in steps of a few per cent.
    step = next(step for least, step in ((4096, 128), (256, 32), (64, 8), (0, 1)) if config.mlp_dim >= least)
    most = share * _block_parameters(config)
    widths = range(config.mlp_dim // step * step, 0, -step)
    return next((width for width in widths if _block_parameters(replace(smaller, mlp_dim=width)) <= most), None)


def _block_parameters(config: ModelConfig) -> int:
    """Return the parameters of all blocks: what a model with twice as many has more."""
    return parameter_count(replace(config, layers=2 * config.layers)) - parameter_count(config)


def _footprint(
    config: ModelConfig,
    scheme: Scheme | None,
    cluster: Cluster,
    length: int,
    *,
    head: str | None = None,
    embedding: str | None = None,
) -> Footprint:
    device = cluster.device
    size = 2.0 if device.kind != "cpu" else 4.0
    blocks = _block_parameters(config)
    table = config.vocab_size * config.dim
    if config.tied:
        head = embedding = head or embedding
    quantised = table + 2.0 * config.vocab_size  # a scale for each token
    output = quantised if head is not None else table * size
    rows = 0.0 if config.tied else quantised if embedding is not None else table * size
    block_bytes = blocks * (size if scheme is None else scheme.bits_per_weight() / 8)
    rest = (parameter_count(config) - blocks - (1 if config.tied else 2) * table) * size
    stored = block_bytes + rest + output + rows
    cache = cache_bytes_per_token(config, int(size))
    rate = device.bandwidth * device.efficiency["memory"]
    peak = device.peak("bf16" if device.kind != "cpu" else "fp32") * device.efficiency["matmul"]
    active = active_parameter_count(config) / parameter_count(config)
    speeds = {}
    for batch in BATCHES:
        # One request reads its own experts, many read all of them.
        read = block_bytes * (active if batch == 1 else 1.0) + output + batch * length * cache
        compute = batch * flops_per_token(config, 2 * length, training=False) / peak
        speeds[batch] = batch / max(read / rate, compute)
    return Footprint(
        parameters=parameter_count(config),
        weight_bytes=round(stored),
        cache_bytes_per_token=cache,
        tokens_per_second=speeds,
    )
