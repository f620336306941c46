"""Seconds of an optimizer step: traffic of weights, gradients and states, further kernels, the host, offload."""

from __future__ import annotations

import math

from piledriver.models.config import ModelConfig
from piledriver.optim.muon import MATRICES_TOGETHER
from piledriver.plan.blocks.operators import matmul
from piledriver.plan.blocks.parameters import ParameterShape, Stage, parts_of
from piledriver.plan.memory.state_bytes import StateBytes
from piledriver.plan.memory.states import stage_states
from piledriver.plan.time.placed import Placed
from piledriver.plan.time.rates import Rates, measured_rate
from piledriver.plan.time.stage import StageSeconds

# Traffic of stochastic rounding outside an optimizer's kernel, for each parameter: its noise is hashed in 64 bits.
_ROUNDING_BYTES = 340.0

# The host's work for the norm of all gradients and for a fused step, in launches, and what each block adds.
_STEP_CALLS, _STEP_CALLS_OF_A_BLOCK = 110, 12
# Seconds of the host for one call of a compiled function.
_COMPILED_CALL = 0.4e-3
# Iterations of Muon, and the host's work for each matrix and for each batch of them, in launches of a kernel.
_NEWTON_SCHULZ, _CALLS_OF_A_MATRIX, _CALLS_OF_A_BATCH = 5, 6, 45
# Traffic of one element of Muon's matrices besides reading and writing weight, momentum and gradient: momenta are
# stacked, cast, measured and divided; each iteration copies what its last product adds to.
_STACK_BYTES, _ITERATION_BYTES = 8 + 6 + 2 + 4 + 12, 4


def optimizer_seconds(placed: Placed, mine: list[tuple[Stage, StageSeconds]], rounds: int) -> tuple[float, float]:
    """Return the seconds of a rank's optimizer and of offload: its step, and the wait for streamed weights.

    The host is ahead of the device by what the blocks took longer on the device than to launch. Blocks are streamed
    while others compute, for each micro-batch; only the first one is waited for in any case.
    """
    parts = [_known_step(placed, stage) for stage, _ in mine]
    ahead = sum(max(0.0, cost.seconds - cost.launched) for _, cost in mine)
    device, host, offload, _ = (sum(part[index] for part in parts) for index in range(4))
    for (stage, cost), (*_, streamed) in zip(mine, parts, strict=True):
        offload += rounds * max(streamed - cost.seconds, streamed / (2 * max(1, len(stage.blocks))))
    return max(device, host - rounds * ahead), offload


def _known_step(placed: Placed, stage: Stage) -> tuple[float, float, float, float]:
    """Return the seconds of `_step`, computed once for layouts alike: micro-batches do not matter."""
    layout = placed.layout
    key = (
        *(placed.key(stage), layout.zero, layout.tp, layout.cp, layout.ep, layout.dp_shard, layout.dp_replicate),
        *(layout.precision, layout.offload, layout.loss_parallel, placed.optimizer, placed.setting.traits, "optimizer"),
    )
    found: tuple[float, float, float, float] | None = placed.memo.get(key)
    if found is None:
        found = placed.memo[key] = _step(placed, stage)
    return found


def _step(placed: Placed, stage: Stage) -> tuple[float, float, float, float]:
    """Return the seconds of a stage's optimizer on the device, of the host for it, of offload, of streamed weights."""
    layout, optimizer = placed.layout, placed.optimizer
    states = stage_states(placed.config, stage, layout, optimizer, placed.setting.traits)
    blocks = states["block"].times(len(stage.blocks))
    total = blocks + states["embedding"] + states["head"]
    if layout.offloads:
        return 0.0, 0.0, _offloaded_step(placed, total), _streamed(placed, blocks)
    rates = Rates(placed.cluster.slowest, placed.setting.matmul_precision, placed.efficiency)
    # Read gradient, weight and states, write weight and states; the norm reads the gradients once more.
    share = total.owned / max(total.elements, 1.0) if layout.zero else 1.0
    traffic = 2 * total.states + 2 * total.weights * min(1.0, share if layout.zero < 3 else 1.0)
    traffic += 3 * total.gradients
    if layout.has_bf16_weights and optimizer in ("adamw", "muon", "lion", "sgd"):
        traffic += _ROUNDING_BYTES * total.owned
    launch = placed.launch(rates.device)
    iterations, host = kernel_seconds(placed.config, stage, optimizer, rates, launch)
    if placed.setting.traits.name == "piledriver":
        host += launch * (_STEP_CALLS + _STEP_CALLS_OF_A_BLOCK * len(stage.blocks))
    return rates.move(traffic) + iterations, host, 0.0, 0.0


def _offloaded_step(placed: Placed, total: StateBytes) -> float:
    """Seconds of transfers and of the step on the host; reads and writes of files overlap with it.

    A measured rate is that of both.
    """
    host, layout = placed.cluster.host, placed.layout
    tiers = layout.tiers
    size = 2 if placed.setting.half_matrices else 4
    moves = 2 * total.owned * size / _link(placed)
    share = tiers.optimizer_share if tiers.optimizer == "disk" else 0.0
    files = 2 * share * total.disk / host.disk
    step = total.owned / host.adam
    if (both := measured_rate(placed.cluster.slowest, "offloaded_step")) is not None:
        moves, step = 0.0, total.owned / both
    return moves + (max(step, files) if tiers.buffers > 1 else step + files)


def _streamed(placed: Placed, blocks: StateBytes) -> float:
    """Seconds of blocks that a micro-batch streams, for its forward and again for its backward; zero 3: of shards."""
    layout, host = placed.layout, placed.cluster.host
    if not layout.streams_parameters:
        return 0.0
    size = 2 if placed.setting.half_matrices else 4
    moved = 2 * size * (blocks.owned if layout.zero == 3 else blocks.elements)
    return moved / (_link(placed) if layout.tiers.parameters == "host" else host.disk)


def _link(placed: Placed) -> float:
    """Return bytes per second between host and device, each way."""
    return measured_rate(placed.cluster.slowest, "host_link") or placed.cluster.host.link


def kernel_seconds(
    config: ModelConfig, stage: Stage, optimizer: str, rates: Rates, launch: float
) -> tuple[float, float]:
    """Return the seconds of Muon's iterations on the device, and those of the host for its calls.

    An optimizer whose update is compiled is called once for each parameter.
    """
    count = len(stage.blocks)
    shapes = parts_of(config).of_kind(experts=any(map(config.has_experts, stage.blocks)))
    if optimizer in ("adamw8bit", "adamw_bf16") and rates.device.kind == "cuda":
        return 0.0, _COMPILED_CALL * count * len(shapes)
    if optimizer != "muon":
        return 0.0, 0.0
    matrices = [one for one in shapes if len(one.shape) > 1]
    batches = math.ceil(count / MATRICES_TOGETHER) * len({one.shape for one in matrices})
    host = launch * (_CALLS_OF_A_MATRIX * count * len(matrices) + _CALLS_OF_A_BATCH * batches)
    return sum(_iterations(one, count, rates) for one in matrices), host


def _iterations(parameter: ParameterShape, count: int, rates: Rates) -> float:
    """Return the seconds of the iterations of `count` matrices of one shape, in bf16 and whole on every rank."""
    short, long = sorted(parameter.shape[-2:])
    stacked = math.prod(parameter.shape[:-2])
    seconds = rates.move((_STACK_BYTES + _NEWTON_SCHULZ * _ITERATION_BYTES) * float(count * stacked * short * long))
    for first in range(0, count, MATRICES_TOGETHER):
        groups = min(MATRICES_TOGETHER, count - first) * stacked
        products = (
            matmul("gram", short, short, long, 2, groups=groups, precision="bf16"),
            matmul("polynomial", short, short, short, 2, groups=groups, precision="bf16"),
            matmul("iterate", short, long, short, 2, groups=groups, precision="bf16"),
        )
        seconds += _NEWTON_SCHULZ * rates.total(products)
    return seconds
