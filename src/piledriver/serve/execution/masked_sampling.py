"""Sampling under masks of tokens after a decode graph: a second graph, replayed when the host knows the masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from piledriver.kernels.sampling import Drawn, RowSettings, draw_tokens, mask_tokens
from piledriver.serve.execution.constraints import fill_masks, mask_words
from piledriver.serve.execution.graphs import CapturedRuns, DecodeResult, HostBuffers
from piledriver.serve.execution.inputs import SampleRow
from piledriver.serve.execution.sampler import AnswerSampler


class MaskedSampling:
    """Draws the tokens of decode steps whose rows have nothing but a temperature and a mask."""

    def __init__(self, inputs: Tensor, last_tokens: Tensor) -> None:
        """`inputs` and `last_tokens` are those of the decode graphs."""
        self._inputs, self._last_tokens = inputs, last_tokens
        self._rows = torch.arange(inputs.shape[1], device=inputs.device)
        self._words: Tensor | None = None
        self._host: HostBuffers
        self._graphs = CapturedRuns()

    @staticmethod
    def fits(answers: Sequence[AnswerSampler]) -> bool:
        """Return whether a mask is all that some of these answers need besides their temperature."""
        return all(answer.by_temperature for answer in answers) and any(answer.constraint for answer in answers)

    def run(
        self, result: DecodeResult, rows: Sequence[SampleRow], answers: Sequence[AnswerSampler]
    ) -> tuple[Drawn, dict[int, str]]:
        """Return tokens for the (padded) rows of a decode step, and the rows whose constraint failed."""
        size, vocab = result.logits.shape
        if self._words is None:
            shape = len(self._rows), mask_words(vocab)
            self._words = torch.zeros(shape, dtype=torch.int32, device=self._rows.device)
            self._host = HostBuffers(self._words)
        masks = self._host.next().numpy()
        failures = fill_masks(masks[: len(answers)], rows, answers)
        masks[len(answers) : size] = -1
        self._host.send(size)
        words = self._words

        def draw(size: int, bound: int) -> DecodeResult:
            changed = result.logits.to(torch.float32, copy=True)
            mask_tokens(changed, self._rows[:size], words[:size])
            temperature, uniform = self._inputs[4:, :size].view(torch.float32)
            settings = RowSettings(temperature, uniform, self._inputs[3, :size], temperature, temperature, False)
            drawn = draw_tokens(changed, settings, result.logits, keep=(self._last_tokens, self._inputs[3, :size]))
            return DecodeResult(changed, drawn, result.key)

        return self._graphs.run(result.key, draw).drawn, failures
