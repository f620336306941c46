"""Conversions between their tensors and ours: invertible operations, named in the YAML files of `families/`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from piledriver.models.config import ModelConfig


class Operation(NamedTuple):
    """A pair of conversions; `write` inverts `read` exactly."""

    read: Callable[[list[Tensor], ModelConfig], Tensor]
    write: Callable[[Tensor, ModelConfig], list[Tensor]]


def _group_qkv(parts: list[Tensor], config: ModelConfig) -> Tensor:
    grouped = [torch.unflatten(part, 0, (config.kv_heads, -1)) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _split_qkv(ours: Tensor, config: ModelConfig) -> list[Tensor]:
    grouped = torch.unflatten(ours, 0, (config.kv_heads, -1))
    sizes = [config.heads // config.kv_heads * config.head_dim, config.head_dim, config.head_dim]
    return [part.flatten(0, 1).contiguous() for part in torch.split(grouped, sizes, dim=1)]


def _alternate(parts: list[Tensor], config: ModelConfig) -> Tensor:
    """Interleave gate and up in blocks of rows: the second-last dimension of matrices, the only one of biases."""
    dim = 0 if parts[0].dim() == 1 else parts[0].dim() - 2
    blocks = [torch.unflatten(part, dim, (-1, config.gate_block)) for part in parts]
    return torch.stack(blocks, dim=dim + 1).flatten(dim, dim + 2)


def _separate(ours: Tensor, config: ModelConfig) -> list[Tensor]:
    dim = 0 if ours.dim() == 1 else ours.dim() - 2
    pairs = torch.unflatten(ours, dim, (-1, 2, config.gate_block))
    return [part.flatten(dim, dim + 1).contiguous() for part in pairs.unbind(dim + 1)]


def _stack_alternate(parts: list[Tensor], config: ModelConfig) -> Tensor:
    half = len(parts) // 2
    return _alternate([torch.stack(parts[:half]), torch.stack(parts[half:])], config)


def _unstack_separate(ours: Tensor, config: ModelConfig) -> list[Tensor]:
    return [expert.contiguous() for part in _separate(ours, config) for expert in part.unbind(0)]


OPERATIONS: dict[str, Operation] = {
    "copy": Operation(lambda parts, _: parts[0], lambda ours, _: [ours]),
    "transpose": Operation(lambda parts, _: parts[0].t(), lambda ours, _: [ours.t().contiguous()]),
    "qkv": Operation(_group_qkv, _split_qkv),
    "joined_qkv": Operation(
        lambda parts, config: _group_qkv(list(parts[0].chunk(3)), config),
        lambda ours, config: [torch.cat(_split_qkv(ours, config))],
    ),
    "joined_qkv_transposed": Operation(
        lambda parts, config: _group_qkv(list(parts[0].t().chunk(3)), config),
        lambda ours, config: [torch.cat(_split_qkv(ours, config)).t().contiguous()],
    ),
    "gate_up": Operation(_alternate, _separate),
    "experts": Operation(
        lambda parts, _: torch.stack(parts), lambda ours, _: [part.contiguous() for part in ours.unbind(0)]
    ),
    "experts_gate_up": Operation(_stack_alternate, _unstack_separate),
}
