"""Quantise the experts of a block: each expert by the tokens that are routed to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piledriver.compress.awq import output_error
from piledriver.compress.calibration import BlockWalk, LayerStatistics
from piledriver.compress.gptq import gptq
from piledriver.compress.scheme import Scheme
from piledriver.kernels.linear import QuantisedWeight, dequantise_weight, quantise_weight
from piledriver.models.block import Block
from piledriver.models.feed_forward.moe import Experts
from piledriver.models.quantised import QuantisedExperts, StackedCodes


@torch.no_grad()
def quantise_experts(
    name: str, block: Block, scheme: Scheme, walk: BlockWalk | None, gptq_settings: dict[str, Any] | None
) -> dict[str, float]:
    """Replace the experts of a block by quantised ones; return the relative squared error of both matrices.

    With `gptq_settings`, each expert is rounded by GPTQ with the inputs of the tokens that are routed to it, the second
    matrix after the first; experts that no calibration token reaches, and all experts otherwise, to the nearest values.
    """
    experts = block.get_submodule("mlp.experts")
    assert isinstance(experts, Experts)
    errors: dict[str, float] = {}
    made: dict[str, StackedCodes] = {}
    for part in ("gate_up", "down"):
        matrices: Tensor = getattr(experts, part)
        known: list[LayerStatistics] | None = None
        if walk is not None and gptq_settings is not None:
            known = _input_statistics(walk, name, block, experts, part)
        small = [
            _round(matrix, None if known is None else known[index], scheme, gptq_settings or {})
            for index, matrix in enumerate(matrices.detach())
        ]
        errors[f"mlp.experts.{part}"] = _error(matrices.detach(), small, known)
        made[part] = StackedCodes(_joined(small), experts.count)
        matrices.copy_(made[part].dense().to(matrices.dtype))  # the second matrix sees what the first now computes
    block.mlp.experts = QuantisedExperts(experts, made["gate_up"], made["down"])
    return errors


def _input_statistics(walk: BlockWalk, name: str, block: Block, experts: Experts, part: str) -> list[LayerStatistics]:
    """Return the statistics of the inputs of one matrix of each expert."""
    columns = getattr(experts, part).shape[2]
    found = [LayerStatistics(columns, walk.device) for _ in range(experts.count)]
    for rows, ends in walk.inputs(name, block, experts):
        x = experts.hidden(rows, ends) if part == "down" else rows
        begin = 0
        for statistics, end in zip(found, ends.tolist(), strict=True):
            if end > begin:
                statistics.add(x[begin:end])
            begin = end
    return found


def _round(
    matrix: Tensor, statistics: LayerStatistics | None, scheme: Scheme, settings: dict[str, Any]
) -> QuantisedWeight:
    if statistics is not None and bool(statistics.moments.diagonal().any()):
        return gptq(matrix, statistics.hessian, scheme, **settings)
    return quantise_weight(matrix, scheme.weights, group=scheme.group, symmetric=scheme.symmetric)


def _joined(parts: list[QuantisedWeight]) -> QuantisedWeight:
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return QuantisedWeight(
        parts[0].kind,
        torch.cat([part.data for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(zeros) if zeros else None,
    )


def _error(matrices: Tensor, small: list[QuantisedWeight], known: list[LayerStatistics] | None) -> float:
    """Return the squared error of all outputs relative to the outputs', or of the weights where no input is known."""
    lost = size = 0.0
    for index, (matrix, one) in enumerate(zip(matrices, small, strict=True)):
        wide = matrix.float()
        difference = dequantise_weight(one, torch.float32) - wide
        if known is None:
            lost, size = lost + float(difference.square().sum()), size + float(wide.square().sum())
        else:
            lost += output_error(difference, known[index].moments)
            size += output_error(wide, known[index].moments)
    return lost / max(size, 1e-30)
