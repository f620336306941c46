"""CUDA graphs of decode steps: one replay instead of hundreds of launches.

A graph is captured when its batch size is first used, after one eager run has compiled the kernels. Batches are padded
to a few sizes; padding rows write to the scratch block. All inputs come from one buffer, filled by one copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from piledriver.kernels.compile_ahead import CompiledAhead, compile_ahead
from piledriver.kernels.decode import gather_step
from piledriver.kernels.decode.reference import ReferenceDecode
from piledriver.kernels.decode.step import StepTensors
from piledriver.kernels.paged_attention import PagedBatch
from piledriver.kernels.sampling import Drawn, RowSettings, draw_tokens
from piledriver.serve.execution.forward import Forward
from piledriver.serve.execution.inputs import StepInputs

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_STEP = 32
_SHORTEST_BOUND = 1024
_RING = 4
_FIELDS = 6
_PADDING = np.array([0, -1, 0, 0, 0, 0], dtype=np.int32)


class DecodeResult(NamedTuple):
    """What a decode step computes, padded to the size of its graph."""

    logits: Tensor
    drawn: Drawn
    """Tokens sampled by temperature alone; they are also the last tokens of their slots."""
    key: tuple[int, int]
    """Rows and context bound of the graph."""


class CapturedRuns:
    """Runs a function of fixed shapes: eagerly when its key is first used, then captured, then replayed."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, int], tuple[Any, DecodeResult] | None] = {}
        self._pool: Any = None

    def run(self, key: tuple[int, int], function: Callable[[int, int], DecodeResult]) -> DecodeResult:
        """Return `function(*key)`; a replay writes to the tensors of the capture."""
        if key not in self._graphs:
            # The first use runs eagerly: kernels are compiled and workspaces allocated outside the capture.
            self._graphs[key] = None
            return function(*key)
        found = self._graphs[key]
        if found is None:
            found = self._graphs[key] = self._capture(key, function)
        found[0].replay()
        return found[1]

    def _capture(self, key: tuple[int, int], function: Callable[[int, int], DecodeResult]) -> tuple[Any, DecodeResult]:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool):
            result = function(*key)
        return graph, result


class HostBuffers:
    """Host copies of an int32 input of the device. One is used again after its copy is long done.

    The engine runs at most one step ahead.
    """

    def __init__(self, device_inputs: Tensor) -> None:
        self._device = device_inputs
        pinned = device_inputs.is_cuda
        self._host = [torch.zeros(device_inputs.shape, dtype=torch.int32, pin_memory=pinned) for _ in range(_RING)]
        self._turn = 0

    def next(self) -> Tensor:
        """Return the buffer to fill for the next step."""
        self._turn = (self._turn + 1) % _RING
        return self._host[self._turn]

    def send(self, rows: int | None = None) -> None:
        """Copy the buffer that `next` returned, or its first rows, to the device."""
        self._device[:rows].copy_(self._host[self._turn][:rows], non_blocking=True)


def context_bound(longest: int, most: int) -> int:
    """Return the context length that a graph is made for: the next power of two, and not a short one."""
    return min(max(_SHORTEST_BOUND, 1 << (longest - 1).bit_length()), most)


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
        self._block_size, self._max_context = block_size, max_context
        self._invariant = invariant
        self._sizes = [size for size in _SIZES if size < max_sequences]
        self._sizes += [*range(96, max_sequences, _STEP), max_sequences]
        device = tables.device
        self.inputs = torch.zeros(_FIELDS, max_sequences, dtype=torch.int32, device=device)
        """Token, source, position, slot, temperature and random number of each row."""
        self._starts = torch.arange(max_sequences + 1, dtype=torch.int32, device=device)
        self._host = HostBuffers(self.inputs)
        self._padding = _PADDING[:, None].copy()
        self._padding[3] = padding_slot
        self._graphs = CapturedRuns()

    @staticmethod
    def fits(inputs: StepInputs) -> bool:
        """Return whether a step is a plain decode step."""
        return len(inputs.tokens) == len(inputs.slots) == len(inputs.samples)

    def run(self, inputs: StepInputs, temperatures: list[float], uniforms: list[float]) -> DecodeResult:
        """Run a decode step: logits, and tokens sampled from them at these temperatures and uniform numbers."""
        count = len(inputs.slots)
        size = next(size for size in self._sizes if size >= count)
        longest = int(inputs.contexts.max())
        self._fill(inputs, temperatures, uniforms, count, size)
        return self._graphs.run((size, context_bound(longest, self._max_context)), self._run)

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows that graphs are made for."""
        return self._sizes

    def prepare(self, size: int) -> None:
        """Compile and capture a decode step of `size` rows and a short context, all of them padding."""
        bound = self._pad(size)
        for _ in range(2):  # compiled, then captured
            self._graphs.run((size, bound), self._run)

    def compile_ahead(self, size: int) -> CompiledAhead:
        """Start compiling the kernels of a decode step of `size` rows and a short context."""
        bound = self._pad(size)

        def dry_run() -> None:
            self._gather(gather_step, size, bound)
            # Other operations read its result, which is not there.
            self._compute(self._gather(ReferenceDecode().gather_step, size, bound), bound)

        return compile_ahead(dry_run)

    def _pad(self, size: int) -> int:
        """Fill the inputs with padding; return the bound of its context."""
        self._host.next().numpy()[:, :size] = self._padding
        self._host.send()
        return context_bound(1, self._max_context)

    def _fill(
        self, inputs: StepInputs, temperatures: list[float], uniforms: list[float], count: int, size: int
    ) -> None:
        rows = self._host.next().numpy()
        for row, values in enumerate((inputs.tokens, inputs.from_slot, inputs.positions, inputs.slots)):
            rows[row, :count] = values
        numbers = rows[4:].view(np.float32)
        numbers[0, :count], numbers[1, :count] = temperatures, uniforms
        if count < size:
            rows[:, count:size] = self._padding
        self._host.send()

    def _run(self, size: int, bound: int) -> DecodeResult:
        return self._compute(self._gather(gather_step, size, bound), bound)

    def _gather(self, gather: Callable[..., StepTensors], size: int, bound: int) -> StepTensors:
        width = -(-bound // self._block_size)
        return gather(self.inputs, self._last_tokens, self._tables, self._block_size, rows=size, width=width)

    def _compute(self, step: StepTensors, bound: int) -> DecodeResult:
        size = len(step.tokens)
        temperature, uniform = self.inputs[4:, :size].view(torch.float32)
        batch = PagedBatch(
            step.tables, self._starts[: size + 1], step.contexts, step.slots, 1, bound, (), self._invariant
        )
        logits = self._forward.logits(self._forward.hidden(step.tokens, step.positions, batch))
        settings = RowSettings(temperature, uniform, step.contexts, temperature, temperature, False)
        drawn = draw_tokens(logits, settings, keep=(self._last_tokens, self.inputs[3, :size]))
        return DecodeResult(logits, drawn, (size, bound))
