"""Dispatch tokens to the ranks that hold their experts, and combine the results.

Without a capacity nothing is dropped; row counts per rank depend on the routing and are read on the host. With a
capacity all shapes are fixed and there is no host sync; dropped choices are counted and skip the experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from piledriver.engine.shards.collectives import Group, all_to_all_rows
from piledriver.models.feed_forward.grouped_mm import ROW_ALIGNMENT
from piledriver.models.feed_forward.moe import Experts, Routing, combine, sort_by_expert


class DroplessDispatcher:
    """Dispatches every choice, however uneven the load."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, experts: Experts, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of the experts' outputs for each token, [tokens, dim]."""
        chosen = routing.experts.flatten()
        order = chosen.argsort(stable=True)
        rows = tokens[order // routing.experts.shape[1]]
        counts = torch.bincount(chosen, minlength=experts.count)
        here = experts.count // self.group.size
        coming = all_to_all_rows(counts, None, None, self.group).view(self.group.size, here)
        sent = counts.view(self.group.size, here).sum(dim=1).tolist()
        received = coming.sum(dim=1).tolist()
        arrived = all_to_all_rows(rows, received, sent, self.group)
        # Rows are ordered by sender, then by expert: sort by expert.
        local = torch.arange(here, device=tokens.device).repeat(self.group.size)
        slots, ends, size = sort_by_expert(local.repeat_interleave(coming.flatten()), here)
        buffer = tokens.new_zeros(size, tokens.shape[1]).index_copy(0, slots, arrived)
        back = all_to_all_rows(experts(buffer, ends)[slots], sent, received, self.group)
        return combine(torch.empty_like(back).index_copy(0, order, back), routing)


class CapacityDispatcher:
    """Gives each expert at most `capacity` times its even share of each rank's choices, first choices first."""

    def __init__(self, group: Group, capacity: float) -> None:
        self.group, self.capacity = group, capacity
        self.counter: Tensor | None = None
        """[2]: choices dropped and choices made on this rank so far; on the device, to avoid a host sync."""

    def __call__(self, experts: Experts, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of the outputs of the experts that had room, [tokens, dim]."""
        if not experts.training:
            # Drops depend on the rest of the batch; evaluation must not.
            return DroplessDispatcher(self.group)(experts, tokens, routing)  # type: ignore[no-any-return]
        count, choices = experts.count, routing.experts.numel()
        room = max(math.ceil(self.capacity * choices / count), 1)
        # First choices of all tokens come before second ones.
        chosen = routing.experts.t().flatten()
        order = chosen.argsort(stable=True)
        counts = torch.zeros(count, dtype=torch.int64, device=chosen.device).scatter_add(
            0, chosen, torch.ones_like(chosen)
        )
        in_line = torch.arange(choices, device=chosen.device) - (counts.cumsum(0) - counts)[chosen[order]]
        turn = torch.empty_like(chosen).scatter(0, order, in_line)
        fits = turn < room
        # Row `count * room` receives dropped choices.
        slots = torch.where(fits, chosen * room + turn, count * room)
        copies = tokens.repeat(routing.experts.shape[1], 1)
        buffer = tokens.new_zeros(count * room + 1, tokens.shape[1]).index_copy(0, slots, copies)
        done = self._run_experts(experts, buffer[:-1], room)
        done = torch.cat((done, done.new_zeros(1, done.shape[1])))[slots]
        self._count(fits)
        by_token = done.view(*routing.experts.t().shape, -1).transpose(0, 1).flatten(0, 1)
        return combine(by_token, routing)

    def _run_experts(self, experts: Experts, buffer: Tensor, room: int) -> Tensor:
        size, here, dim = self.group.size, experts.count // self.group.size, buffer.shape[1]
        arrived = all_to_all_rows(buffer, None, None, self.group).view(size, here, room, dim).transpose(0, 1)
        rows = arrived.reshape(here, size * room, dim)
        aligned = -(-size * room // ROW_ALIGNMENT) * ROW_ALIGNMENT
        rows = torch.nn.functional.pad(rows, (0, 0, 0, aligned - size * room))
        ends = torch.arange(1, here + 1, device=buffer.device, dtype=torch.int32) * aligned
        done = experts(rows.flatten(0, 1), ends).view(here, aligned, dim)[:, : size * room]
        back = done.reshape(here, size, room, dim).transpose(0, 1).reshape(-1, dim)
        return all_to_all_rows(back, None, None, self.group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count(self, fits: Tensor) -> None:
        new = torch.stack(((~fits).sum(), fits.new_full((), fits.numel(), dtype=torch.int64)))
        self.counter = new if self.counter is None else self.counter + new
