"""CUDA graphs of short prefills: one sequence with a few hundred new tokens, slower to launch than to compute.

The tokens are padded to a few sizes. Padding tokens are a second sequence in the scratch block, so that the first one
is computed as it would be alone. A graph is captured when its size is used for the second time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from piledriver.kernels.compile_ahead import CompiledAhead, compile_ahead
from piledriver.kernels.paged_attention import PagedBatch
from piledriver.kernels.sampling import RowSettings, draw_tokens
from piledriver.serve.execution.forward import Forward
from piledriver.serve.execution.graphs import CapturedRuns, DecodeResult, HostBuffers, context_bound
from piledriver.serve.execution.inputs import BlockTables, StepInputs
from piledriver.serve.execution.pages import PagedCache
from piledriver.serve.execution.sampler import AnswerSampler

PREFILL_SIZES = (32, 64, 128, 256)
"""Numbers of tokens that graphs are made for."""
_MOST = PREFILL_SIZES[-1]
# Places behind the tokens, four apart: kernels are compiled for aligned addresses.
_STARTS, _CONTEXTS, _OWNERS, _LAST, _TEMPERATURE, _UNIFORM, _SCALARS = range(0, 28, 4)


class PrefillGraphs:
    """Runs steps that compute a short prompt, or the last part of one, and sample its first token."""

    def __init__(
        self,
        forward: Forward,
        cache: PagedCache,
        host_tables: BlockTables,
        tables: Tensor,
        last_tokens: Tensor,
        *,
        invariant: bool,
    ) -> None:
        self._forward, self._host_tables, self._invariant = forward, host_tables, invariant
        self._tables, self._last_tokens = tables, last_tokens
        self._block_size, self._max_context = cache.block_size, cache.length
        self._scratch = cache.scratch_block * cache.block_size
        length = 3 * _MOST + _SCALARS
        self._inputs = torch.zeros(length, dtype=torch.int32, device=tables.device)
        self._host, self._graphs = HostBuffers(self._inputs), CapturedRuns()
        self._spans: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def fits(inputs: StepInputs, answers: Sequence[AnswerSampler]) -> bool:
        """Return whether a step is a short prefill of one sequence whose tokens the host knows."""
        return (
            len(inputs.slots) == len(inputs.samples) == 1
            and len(inputs.tokens) <= _MOST
            and answers[0].params.prompt_logprobs is None
            and not (inputs.from_slot >= 0).any()
        )

    def run(self, inputs: StepInputs, temperature: float, uniform: float) -> DecodeResult:
        """Run a prefill: logits of its last token, and a token sampled from them."""
        return self._graphs.run(self._fill(inputs, temperature, uniform), self._run)

    def compile_ahead(self, inputs: StepInputs) -> CompiledAhead:
        """Start compiling the kernels of a prefill of this size."""
        size, bound = self._fill(inputs, 0.0, 0.0)
        return compile_ahead(functools.partial(self._run, size, bound))

    def _fill(self, inputs: StepInputs, temperature: float, uniform: float) -> tuple[int, int]:
        """Send the inputs to the device; return the padded number of tokens and the bound of the context."""
        size = next(size for size in PREFILL_SIZES if size >= len(inputs.tokens))
        buffer, count, slot = self._host.next().numpy(), len(inputs.tokens), int(inputs.slots[0])
        positions = inputs.positions
        blocks = self._host_tables.array[slot, positions // self._block_size]
        rows = buffer[: 3 * _MOST].reshape(3, _MOST)
        rows[0, :count], rows[0, count:size] = inputs.tokens, 0
        rows[1, :count], rows[1, count:size] = positions, 0
        rows[2, :count] = blocks * self._block_size + positions % self._block_size
        rows[2, count:size] = self._scratch
        scalars = buffer[3 * _MOST :]
        padding = self._host_tables.padding_slot
        scalars[_STARTS : _STARTS + 3] = 0, count, size
        scalars[_CONTEXTS : _CONTEXTS + 2] = inputs.contexts[0], size - count
        scalars[_OWNERS : _OWNERS + 2] = slot, padding
        scalars[_LAST] = count - 1
        numbers = scalars.view(np.float32)
        numbers[_TEMPERATURE], numbers[_UNIFORM] = temperature, uniform
        self._spans = (*inputs.spans, (size - count, size - count))
        self._host.send()
        return size, context_bound(max(int(inputs.contexts[0]), size), self._max_context)

    def _run(self, size: int, bound: int) -> DecodeResult:
        rows, scalars = self._inputs[: 3 * _MOST].view(3, _MOST)[:, :size].long(), self._inputs[3 * _MOST :]
        owners = scalars[_OWNERS : _OWNERS + 2]
        batch = PagedBatch(
            self._tables[:, : -(-bound // self._block_size)].index_select(0, owners),
            scalars[_STARTS : _STARTS + 3],
            scalars[_CONTEXTS : _CONTEXTS + 2],
            rows[2],
            size,
            bound,
            self._spans,
            self._invariant,
        )
        hidden = self._forward.hidden(rows[0], rows[1], batch)
        logits = self._forward.logits(hidden.index_select(0, scalars[_LAST : _LAST + 1]))
        numbers = scalars.view(torch.float32)
        temperature, uniform = numbers[_TEMPERATURE : _TEMPERATURE + 1], numbers[_UNIFORM : _UNIFORM + 1]
        settings = RowSettings(temperature, uniform, owners[:1], temperature, temperature, False)
        drawn = draw_tokens(logits, settings, keep=(self._last_tokens, owners[:1]))
        return DecodeResult(logits, drawn, (size, bound))
