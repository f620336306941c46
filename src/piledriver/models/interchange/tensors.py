"""Conversions between their tensors and ours: invertible operations, named in the YAML files of `families/`.

An operation takes their tensors in the order in which a family lists them. Our layouts: rows of `qkv` are grouped by
key-value head, rows of gate and up alternate in blocks, and rotated dimensions of a head come first, dimension i paired
with i + half. Families that pair neighbours (2i with 2i + 1) have their rows permuted, which is exact and leaves
scores as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from piledriver.models.config import ModelConfig, gate_block_of


class Operation(NamedTuple):
    """A pair of conversions; `write` inverts `read` exactly."""

    read: Callable[[list[Tensor], ModelConfig], Tensor]
    write: Callable[[Tensor, ModelConfig], list[Tensor]]
    views: Callable[[Tensor, ModelConfig], list[Tensor]] | None = None
    """Their tensors as views of ours, each in a shape to which theirs can be reshaped; None if they are not."""

    def read_into(self, ours: Tensor, parts: list[Tensor], config: ModelConfig) -> None:
        """Copy their tensors to ours, without memory for another copy where they have a place in it."""
        if self.views is None:
            ours.copy_(self.read(parts, config))
            return
        for place, part in zip(self.views(ours, config), parts, strict=True):
            place.copy_(part.reshape(place.shape))


def _group_qkv(parts: list[Tensor], config: ModelConfig) -> Tensor:
    grouped = [torch.unflatten(part, 0, (config.kv_heads, -1)) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _view_qkv(ours: Tensor, config: ModelConfig) -> list[Tensor]:
    grouped = torch.unflatten(ours, 0, (config.kv_heads, -1))
    sizes = [config.heads // config.kv_heads * config.head_dim, config.head_dim, config.head_dim]
    return list(torch.split(grouped, sizes, dim=1))


def _split_qkv(ours: Tensor, config: ModelConfig) -> list[Tensor]:
    return [part.flatten(0, 1).contiguous() for part in _view_qkv(ours, config)]


def _unjoin_qkv(joined: Tensor, config: ModelConfig) -> list[Tensor]:
    sizes = [config.heads * config.head_dim, config.kv_heads * config.head_dim, config.kv_heads * config.head_dim]
    return list(torch.split(joined, sizes))


def _halves(x: Tensor, config: ModelConfig, dim: int = 0) -> Tensor:
    """Reorder the rotated dimensions of a head from neighbours to halves: 0, 2, 4, ..., 1, 3, 5, ..."""
    pairs, rest = torch.split(x, [config.rotary_dim, x.shape[dim] - config.rotary_dim], dim=dim)
    pairs = torch.unflatten(pairs, dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)
    return torch.cat((pairs, rest), dim=dim)


def _neighbours(x: Tensor, config: ModelConfig, dim: int = 0) -> Tensor:
    """Invert `_halves`."""
    pairs, rest = torch.split(x, [config.rotary_dim, x.shape[dim] - config.rotary_dim], dim=dim)
    pairs = torch.unflatten(pairs, dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)
    return torch.cat((pairs, rest), dim=dim).contiguous()


def _by_head(change: Callable[[Tensor, ModelConfig, int], Tensor], x: Tensor, config: ModelConfig) -> Tensor:
    return change(torch.unflatten(x, 0, (-1, config.head_dim)), config, 1).flatten(0, 1)


def _read_paired_qkv(parts: list[Tensor], config: ModelConfig) -> Tensor:
    q, k, v = parts
    return _group_qkv([_by_head(_halves, q, config), _by_head(_halves, k, config), v], config)


def _write_paired_qkv(ours: Tensor, config: ModelConfig) -> list[Tensor]:
    q, k, v = _split_qkv(ours, config)
    return [_by_head(_neighbours, q, config), _by_head(_neighbours, k, config), v]


def _rope_first(x: Tensor, config: ModelConfig) -> Tensor:
    """Move the rotated dimensions of each query head of latent attention from its end to its start."""
    return torch.unflatten(x, 0, (-1, config.head_dim)).roll(config.rotary_dim, dims=1).flatten(0, 1)


def _rope_last(x: Tensor, config: ModelConfig) -> Tensor:
    return torch.unflatten(x, 0, (-1, config.head_dim)).roll(-config.rotary_dim, dims=1).flatten(0, 1)


def _on_shared_key(change: Callable[[Tensor, ModelConfig, int], Tensor], x: Tensor, config: ModelConfig) -> Tensor:
    """Change the rotated key that latent attention shares, the last rows of the projection of keys and values."""
    latent, key = torch.split(x, [x.shape[0] - config.rotary_dim, config.rotary_dim])
    return torch.cat((latent, change(key, config, 0)))


def _row_dim(x: Tensor) -> int:
    """Return the dimension of rows: the second-last of matrices, the only one of biases."""
    return 0 if x.dim() == 1 else x.dim() - 2


def _alternate(parts: list[Tensor], dim: int) -> Tensor:
    """Interleave gate and up in blocks of rows."""
    blocks = [torch.unflatten(part, dim, (-1, gate_block_of(part.shape[dim]))) for part in parts]
    return torch.stack(blocks, dim=dim + 1).flatten(dim, dim + 2)


def _view_gate_up(ours: Tensor, dim: int) -> list[Tensor]:
    return list(torch.unflatten(ours, dim, (-1, 2, gate_block_of(ours.shape[dim] // 2))).unbind(dim + 1))


def _separate(ours: Tensor, dim: int) -> list[Tensor]:
    return [part.flatten(dim, dim + 1).contiguous() for part in _view_gate_up(ours, dim)]


def _stack_alternate(parts: list[Tensor]) -> Tensor:
    half = len(parts) // 2
    return _alternate([torch.stack(parts[:half]), torch.stack(parts[half:])], 1)


def _view_stacked_gate_up(ours: Tensor) -> list[Tensor]:
    return [expert for part in _view_gate_up(ours, 1) for expert in part.unbind(0)]


def _unstack_separate(ours: Tensor) -> list[Tensor]:
    return [expert.flatten(0, 1).contiguous() for expert in _view_stacked_gate_up(ours)]


def _zipped(parts: list[Tensor], dim: int) -> Tensor:
    """Return gate and up row by row in turn."""
    return torch.stack(parts, dim=dim + 1).flatten(dim, dim + 1)


def _unzipped(x: Tensor, dim: int) -> list[Tensor]:
    return list(torch.unflatten(x, dim, (-1, 2)).unbind(dim + 1))


def _swapped(x: Tensor) -> Tensor:
    return x.transpose(-2, -1).contiguous()


OPERATIONS: dict[str, Operation] = {
    "copy": Operation(lambda parts, _: parts[0], lambda ours, _: [ours], lambda ours, _: [ours]),
    "scalar": Operation(lambda parts, _: parts[0].reshape(1), lambda ours, _: [ours.reshape(())]),
    "transpose": Operation(lambda parts, _: parts[0].t(), lambda ours, _: [ours.t().contiguous()]),
    "qkv": Operation(_group_qkv, _split_qkv, _view_qkv),
    "joined_qkv": Operation(
        lambda parts, config: _group_qkv(_unjoin_qkv(parts[0], config), config),
        lambda ours, config: [torch.cat(_split_qkv(ours, config))],
    ),
    "joined_qkv_transposed": Operation(
        lambda parts, config: _group_qkv(_unjoin_qkv(parts[0].t(), config), config),
        lambda ours, config: [torch.cat(_split_qkv(ours, config)).t().contiguous()],
    ),
    # Of families that rotate neighbouring dimensions together.
    "paired_qkv": Operation(_read_paired_qkv, _write_paired_qkv),
    "paired_head_norm": Operation(
        lambda parts, config: _halves(parts[0], config, 1), lambda ours, config: [_neighbours(ours, config, 1)]
    ),
    "latent_q": Operation(
        lambda parts, config: _rope_first(parts[0], config), lambda ours, config: [_rope_last(ours, config)]
    ),
    "paired_latent_q": Operation(
        lambda parts, config: _by_head(_halves, _rope_first(parts[0], config), config),
        lambda ours, config: [_rope_last(_by_head(_neighbours, ours, config), config)],
    ),
    "paired_latent_kv": Operation(
        lambda parts, config: _on_shared_key(_halves, parts[0], config),
        lambda ours, config: [_on_shared_key(_neighbours, ours, config)],
    ),
    "gate_up": Operation(
        lambda parts, _: _alternate(parts, _row_dim(parts[0])),
        lambda ours, _: _separate(ours, _row_dim(ours)),
        lambda ours, _: _view_gate_up(ours, _row_dim(ours)),
    ),
    "joined_gate_up": Operation(
        lambda parts, _: _alternate(list(parts[0].chunk(2, _row_dim(parts[0]))), _row_dim(parts[0])),
        lambda ours, _: [torch.cat(_separate(ours, _row_dim(ours)), _row_dim(ours))],
    ),
    "stack": Operation(
        lambda parts, _: torch.stack(parts),
        lambda ours, _: [part.contiguous() for part in ours.unbind(0)],
        lambda ours, _: list(ours.unbind(0)),
    ),
    "stack_gate_up": Operation(
        lambda parts, _: _stack_alternate(parts),
        lambda ours, _: _unstack_separate(ours),
        lambda ours, _: _view_stacked_gate_up(ours),
    ),
    "stacked_transposed": Operation(lambda parts, _: _swapped(parts[0]), lambda ours, _: [_swapped(ours)]),
    "stacked_gate_up_transposed": Operation(
        lambda parts, _: _alternate(list(_swapped(parts[0]).chunk(2, 1)), 1),
        lambda ours, _: [_swapped(torch.cat(_separate(ours, 1), 1))],
    ),
    "zipped_gate_up_transposed": Operation(
        lambda parts, _: _alternate(_unzipped(_swapped(parts[0]), 1), 1),
        lambda ours, _: [_swapped(_zipped(_separate(ours, 1), 1))],
    ),
    "zipped_gate_up_bias": Operation(
        lambda parts, _: _alternate(_unzipped(parts[0], 1), 1), lambda ours, _: [_zipped(_separate(ours, 1), 1)]
    ),
}
