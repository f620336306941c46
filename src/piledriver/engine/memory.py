"""Bytes of parameters, gradients and optimizer states on this rank: measured, and expected by formula."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.layout import Layout
from piledriver.engine.state import gradients_so_far
from piledriver.optim.shards import local


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes on this rank. Gradients exist between the backward and `zero_grad`."""

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        """Return the sum of all three."""
        return self.parameters + self.gradients + self.optimizer_state

    def __str__(self) -> str:
        parts = (("parameters", self.parameters), ("gradients", self.gradients), ("optimizer", self.optimizer_state))
        return ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in parts)


def measure(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> MemoryReport:
    """Return the bytes of all storages on this rank; shared storage counts once."""
    models = list(models)
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in _tensors(state)]
    return MemoryReport(
        parameters=_bytes(p.detach() for model in models for p in model.parameters()),
        gradients=_bytes(gradient for model in models for gradient in gradients_so_far(model)),
        optimizer_state=_bytes(states),
    )


def expected_bytes(parameters: int, layout: Layout) -> MemoryReport:
    """Return what fp32 weights with Adam take: 16 bytes per parameter, sharded by ZeRO stage.

    `parameters` counts those of one model-parallel rank: divide by tp and pp first.

    >>> expected_bytes(1000, Layout(zero=2).on(4)).total
    7000
    """
    assert layout.dp_shard is not None
    share = layout.dp_shard * layout.cp if layout.zero else 1
    return MemoryReport(
        parameters=4 * parameters // (share if layout.zero == 3 else 1),
        gradients=4 * parameters // (share if layout.zero >= 2 else 1),
        optimizer_state=8 * parameters // share,
    )


def _tensors(state: Any) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)] if isinstance(state, dict) else []


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        storage = local(tensor.detach()).untyped_storage()
        storages[storage.data_ptr(), str(storage.device)] = storage.nbytes()
    return sum(storages.values())
