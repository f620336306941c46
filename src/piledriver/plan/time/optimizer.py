"""Seconds of an optimizer's kernels besides the traffic of weights, gradients and states."""

from __future__ import annotations

import math

from piledriver.models.config import ModelConfig
from piledriver.optim.muon import MATRICES_TOGETHER
from piledriver.plan.blocks.operators import matmul
from piledriver.plan.blocks.parameters import ParameterShape, Stage, parts_of
from piledriver.plan.time.rates import Rates

# Seconds of the host for one call of a compiled function.
_COMPILED_CALL = 1.2e-3
# Iterations of Muon, and what the host runs for each matrix and for each batch of them, in launches of a kernel: an
# eager operator takes about as long as three.
_NEWTON_SCHULZ, _CALLS_OF_A_MATRIX, _CALLS_OF_A_BATCH = 5, 27, 216
# Traffic of one element of Muon's matrices besides reading and writing weight, momentum and gradient: momenta are
# stacked, cast, measured and divided; each iteration copies what its last product adds to.
_STACK_BYTES, _ITERATION_BYTES = 8 + 6 + 2 + 4 + 12, 4


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
