"""CUDA graphs of decode steps: one replay instead of hundreds of launches.

A graph is captured when its batch size is first used, after one eager run has compiled the kernels. Batches are padded
to a few sizes; padding rows write to the scratch block. All inputs come from one buffer, filled by one copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piledriver.kernels.paged_attention import PagedBatch
from piledriver.serve.execution.forward import Forward
from piledriver.serve.execution.inputs import StepInputs

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_STEP = 32
_SHORTEST_BOUND = 1024
_RING = 4
_FIELDS = 4


@dataclass
class _Graph:
    graph: Any
    logits: Tensor


class DecodeGraphs:
    """Runs steps in which every sequence has one new token."""

    def __init__(
        self,
        forward: Forward,
        tables: Tensor,
        last_tokens: Tensor,
        *,
        block_size: int,
        max_context: int,
        max_sequences: int,
        padding_slot: int,
        invariant: bool,
    ) -> None:
        self._forward, self._tables, self._last_tokens = forward, tables, last_tokens
        self._block_size, self._max_context, self._padding_slot = block_size, max_context, padding_slot
        self._invariant = invariant
        self._sizes = [size for size in _SIZES if size < max_sequences]
        self._sizes += [*range(96, max_sequences, _STEP), max_sequences]
        device = tables.device
        self._inputs = torch.zeros(_FIELDS, max_sequences, dtype=torch.int32, device=device)
        # A host buffer is reused after its copy is long done: the engine runs at most one step ahead.
        self._host = [torch.zeros(_FIELDS, max_sequences, dtype=torch.int32).pin_memory() for _ in range(_RING)]
        self._turn = 0
        self._graphs: dict[tuple[int, int], _Graph | None] = {}
        self._pool: Any = None

    @staticmethod
    def fits(inputs: StepInputs) -> bool:
        """Return whether a step is a plain decode step."""
        return len(inputs.tokens) == len(inputs.slots) == len(inputs.samples)

    def logits(self, inputs: StepInputs) -> Tensor:
        """Return [sequences, vocab] logits of a decode step."""
        count = len(inputs.slots)
        size = next(size for size in self._sizes if size >= count)
        longest = int(inputs.contexts.max())
        bound = min(max(_SHORTEST_BOUND, 1 << (longest - 1).bit_length()), self._max_context)
        self._fill(inputs, count, size)
        key = size, bound
        if key not in self._graphs:
            # The first use runs eagerly: kernels are compiled and workspaces allocated outside the capture.
            self._graphs[key] = None
            return self._run(size, bound)[:count]
        found = self._graphs[key]
        if found is None:
            found = self._graphs[key] = self._capture(size, bound)
        found.graph.replay()
        return found.logits[:count]

    def _fill(self, inputs: StepInputs, count: int, size: int) -> None:
        host = self._host[self._turn]
        self._turn = (self._turn + 1) % _RING
        rows = host.numpy()
        for row, values in enumerate((inputs.tokens, inputs.from_slot, inputs.positions, inputs.slots)):
            rows[row, :count] = values
        rows[:, count:size] = np.array([0, -1, 0, self._padding_slot], dtype=np.int32)[:, None]
        self._inputs.copy_(host, non_blocking=True)

    def _run(self, size: int, bound: int) -> Tensor:
        tokens, from_slot, positions, rows = self._inputs[:, :size].long()
        tokens = torch.where(from_slot >= 0, self._last_tokens[from_slot], tokens)
        blocks = self._tables[rows, positions // self._block_size].long()
        batch = PagedBatch(
            self._tables[rows],
            torch.arange(size + 1, dtype=torch.int32, device=tokens.device),
            (positions + 1).int(),
            blocks * self._block_size + positions % self._block_size,
            1,
            bound,
            (),
            self._invariant,
        )
        return self._forward.logits(self._forward.hidden(tokens, positions, batch))

    def _capture(self, size: int, bound: int) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._run(size, bound)
        return _Graph(graph, logits)
