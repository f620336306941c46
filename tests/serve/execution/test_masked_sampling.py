"""Sampling under masks after a decode graph draws what sampling outside of it draws."""

from __future__ import annotations

from typing import Any

import torch

from piledriver.kernels.sampling import Drawn
from piledriver.serve.execution.graphs import DecodeResult
from piledriver.serve.execution.inputs import SampleRow
from piledriver.serve.execution.masked_sampling import MaskedSampling
from piledriver.serve.execution.sampler import AnswerSampler, sample
from piledriver.serve.request import SamplingParams


class Only:
    """Allows the tokens of a list; fails if it is empty."""

    finished = False

    def __init__(self, allowed: list[int]) -> None:
        self.allowed = allowed

    def fill_mask(self, mask: Any) -> None:
        if not self.allowed:
            raise ValueError("nothing is allowed")
        for token in self.allowed:
            mask[token // 32] |= 1 << token % 32

    def accept(self, token: int) -> None: ...

    def rollback(self, count: int) -> None: ...


def test_tokens_and_failures_are_those_of_sampling_outside_of_a_graph() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    constraints = [Only([3, 40]), None, Only([7]), Only([])]
    settings = [SamplingParams(temperature=0), SamplingParams(seed=3), SamplingParams(seed=4), SamplingParams(seed=5)]
    answers = [AnswerSampler(p, 0, c) for p, c in zip(settings, constraints, strict=True)]  # type: ignore[arg-type]
    rows: Any = [SampleRow(None, 2)] * 4  # type: ignore[arg-type]
    inputs, last = torch.zeros(6, 8, dtype=torch.int32), torch.zeros(9, dtype=torch.int64)
    inputs[3, :4] = torch.tensor([5, 6, 7, 8])
    inputs[4].view(torch.float32)[:4] = torch.tensor([answer.params.temperature for answer in answers])
    inputs[5].view(torch.float32)[:4] = torch.tensor([answer.uniform(2) for answer in answers])
    assert MaskedSampling.fits(answers)
    assert not MaskedSampling.fits([answers[1]])
    unmasked = Drawn(torch.zeros(4, dtype=torch.int64), torch.zeros(4))
    drawn, failures = MaskedSampling(inputs, last).run(DecodeResult(logits, unmasked, (4, 64)), rows, answers)
    expected = sample(logits, rows, answers)
    assert torch.equal(drawn.tokens, expected.drawn.tokens)
    assert torch.equal(drawn.logprobs, expected.drawn.logprobs)
    assert drawn.tokens[2] == 7
    assert failures == expected.failures == {3: "ValueError: nothing is allowed"}
    assert torch.equal(last[5:], drawn.tokens)
