"""Plan inference: memory with its key-value cache, and tokens per second, of a model that is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from piledriver.core.errors import PiledriverError
from piledriver.engine.tensor_parallel.transformer import check_tp_divisible
from piledriver.models.config import ModelConfig
from piledriver.models.model_size import active_parameter_count, cache_bytes_per_token, flops_per_token, parameter_count
from piledriver.plan.blocks.operators import Exchange
from piledriver.plan.errors import PlanError
from piledriver.plan.hardware.cluster import HEADROOM, Cluster
from piledriver.plan.hardware.parse import parse_hardware
from piledriver.plan.model_config import config_of
from piledriver.plan.time.links import Axis, collective_seconds
from piledriver.plan.time.rates import Efficiency

_GIB = 2**30
# The context of the device, and buffers that do not depend on the model.
_FIXED_BYTES = 1.2 * _GIB
# Tokens of prompts that are computed together.
_PREFILL_TOKENS = 8192
_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.56}


@dataclass(frozen=True, kw_only=True)
class InferencePlan:
    """A model served by replicas of `tp` devices each."""

    tp: int
    replicas: int
    weights: float
    cache: float
    """Bytes of the key-value cache of the batch, on one device."""
    activations: float
    capacity: float
    """Bytes of one device that may be used."""
    prefill_seconds: float
    """Time to the first token of the batch."""
    decode_seconds: float
    """Time of one token for the whole batch."""
    batch: int
    longest_batch: int
    """Requests of this length whose cache would fit."""

    @property
    def total(self) -> float:
        """Bytes of one device."""
        return self.weights + self.cache + self.activations + _FIXED_BYTES

    @property
    def fits(self) -> bool:
        """Whether weights, cache and activations fit one device."""
        return self.total <= self.capacity

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens of all replicas in a second."""
        return self.replicas * self.batch / self.decode_seconds


def plan_inference(
    model: Any, *, batch: int, length: int, hardware: str | Cluster = "here", precision: str = "bf16", prompt: int = 0
) -> InferencePlan:
    """Return the fastest replicas for requests of `length` tokens (prompt included), `batch` of them on each replica.

    >>> found = plan_inference("llama-3-8b", batch=32, length=4096, hardware="1xh100-80g")
    >>> found.fits, found.tp
    (True, 1)
    """
    config, name = config_of(model)
    cluster = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    if precision not in _BYTES:
        raise PlanError(f"precision {precision!r} is unknown", fix=f"use one of {', '.join(_BYTES)}")
    made = [
        _replica(config, cluster, tp, batch, length, precision, prompt or length // 2)
        for tp in (1, 2, 4, 8)
        if tp <= min(cluster.node_size, cluster.count) and cluster.count % tp == 0 and _divides(config, tp)
    ]
    fitting = [one for one in made if one.fits]
    if not fitting:
        nearest = min(made, key=lambda one: one.total - one.capacity)
        missing = (nearest.total - nearest.capacity) / _GIB
        raise PlanError(
            f"{name} with {batch} requests of {length} tokens is {missing:.1f} GiB too large for {cluster.name} at tp "
            f"{nearest.tp}",
            fix=f"use {nearest.longest_batch} requests, shorter ones, or precision int8"
            if nearest.longest_batch
            else "use more or larger devices of one node, or precision int8 or int4: the weights leave no room",
        )
    return max(fitting, key=lambda one: one.tokens_per_second)


def _divides(config: ModelConfig, tp: int) -> bool:
    try:
        check_tp_divisible(config, tp)
    except PiledriverError:
        return False
    return True


def _replica(
    config: ModelConfig, cluster: Cluster, tp: int, batch: int, length: int, precision: str, prompt: int
) -> InferencePlan:
    device, size = cluster.device, _BYTES[precision]
    weights = parameter_count(config) * size / tp
    per_token = cache_bytes_per_token(config) / tp
    cache = batch * length * per_token
    per_prompt_token = (4 * config.dim + 3 * config.mlp_dim / tp) * 2.0
    logits = config.vocab_size * 4 / tp
    activations = min(batch * prompt, _PREFILL_TOKENS) * per_prompt_token + batch * logits
    capacity = device.memory * (1 - HEADROOM)
    rate = device.bandwidth * device.efficiency["memory"]
    whole = batch * config.dim * 2.0
    hop = collective_seconds("all-reduce", whole, Axis(tp, 1), cluster, Efficiency())
    exchange = Exchange("all-reduce", "tp", whole, 2 * config.layers)
    read = active_parameter_count(config) if batch == 1 else parameter_count(config)
    moved = (read * size / tp + batch * (length / 2) * per_token) / rate
    flops_per_second = tp * device.peak("bf16") * device.efficiency["matmul"]
    decode = max(moved, batch * flops_per_token(config, length, training=False) / flops_per_second)
    decode += exchange.count * hop
    prefill = flops_per_token(config, prompt, training=False) * batch * prompt / flops_per_second
    prefill += exchange.count * collective_seconds("all-reduce", whole * prompt, Axis(tp, 1), cluster, Efficiency())
    free = capacity - weights - _FIXED_BYTES
    each = length * per_token + logits
    longest = max(free / (each + prompt * per_prompt_token), 0.0)
    if longest * prompt > _PREFILL_TOKENS:
        longest = (free - _PREFILL_TOKENS * per_prompt_token) / each
    return InferencePlan(
        tp=tp,
        replicas=cluster.count // tp,
        weights=weights,
        cache=cache,
        activations=activations,
        capacity=capacity,
        prefill_seconds=prefill,
        decode_seconds=decode,
        batch=batch,
        longest_batch=int(longest),
    )
