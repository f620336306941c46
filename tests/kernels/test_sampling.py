"""Sampling follows the distribution that its settings leave, and a row does not depend on the others."""

from __future__ import annotations

import numpy as np
import torch

from piledriver.kernels.sampling import RowSettings, draw_tokens, mask_tokens, token_logprobs
from piledriver.kernels.sampling.reference import truncate_row
from tests.kernels.interpreter import interpret

CHECK = """
import torch
from piledriver.kernels.sampling import RowSettings
from piledriver.kernels.sampling.reference import ReferenceSampling
from piledriver.kernels.sampling.triton import TritonSampling
torch.manual_seed(0)
logits = torch.randn(24, 9000) * 3
logits[3, 100:] = -torch.inf
uniform = torch.rand(24)
uniform[5], uniform[6] = 0, 1 - 2**-24
plain = torch.zeros(24)
for truncates in (False, True):
    settings = RowSettings(
        torch.tensor([0.0, 0.7, 1.0, 2.0] * 6),
        uniform,
        (torch.tensor([0, 5, 50, 0] * 6) if truncates else plain).int(),
        torch.tensor([1.0, 1, 0.9, 0.5] * 6) if truncates else plain + 1,
        torch.tensor([0.0, 0, 0, 0.05, 0, 0] * 4) if truncates else plain,
        truncates,
    )
    last = torch.zeros(30, dtype=torch.int64)
    found = TritonSampling()(logits, settings, logits, keep=(last, torch.arange(28, 4, -1)))
    expected = ReferenceSampling()(logits, settings, logits)
    assert torch.equal(last[5:29].flip(0), expected.tokens)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    again = TritonSampling().token_logprobs(logits, found.tokens)
    assert torch.equal(again, found.logprobs)
words = torch.randint(-(2**31), 2**31, (2, 282), dtype=torch.int64).to(torch.int32)
rows, masked, expected = torch.tensor([7, 2]), logits.clone(), logits.clone()
TritonSampling().mask_tokens(masked, rows, words)
ReferenceSampling().mask_tokens(expected, rows, words)
assert torch.equal(masked, expected) and masked[7].isinf().any() and not masked[0].isinf().any()
"""


def settings(rows: int, **changes: float) -> RowSettings:
    values = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0, "min_p": 0.0, **changes}
    columns = {name: torch.full((rows,), value) for name, value in values.items()}
    uniform = (torch.arange(rows) + 0.5) / rows
    cut = values["top_k"] > 0 or values["top_p"] < 1 or values["min_p"] > 0
    return RowSettings(
        columns["temperature"], uniform, columns["top_k"].int(), columns["top_p"], columns["min_p"], bool(cut)
    )


def test_uniform_numbers_become_the_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40) * 2
    for changes in (
        {},
        {"temperature": 0.5},
        {"top_k": 7.0},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 9.0, "top_p": 0.7},
    ):
        rows = 500
        drawn = draw_tokens(logits.expand(rows, -1), settings(rows, **changes)).tokens
        shares = np.bincount(drawn.numpy(), minlength=40) / rows
        scaled = logits / changes.get("temperature", 1.0)
        kept = truncate_row(scaled, int(changes.get("top_k", 0)), changes.get("top_p", 1.0), changes.get("min_p", 0.0))
        assert np.abs(shares - kept.softmax(-1).numpy()).max() <= 1 / rows


def test_what_is_cut_off_is_what_the_names_say() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.06, 0.04]).log()
    kept = {
        "top_k": truncate_row(logits, 2, 1.0, 0.0),
        "top_p": truncate_row(logits, 0, 0.8, 0.0),
        "min_p": truncate_row(logits, 0, 1.0, 0.2),
    }
    counts = {name: int((row > -torch.inf).sum()) for name, row in kept.items()}
    assert counts == {"top_k": 2, "top_p": 3, "min_p": 3}


def test_temperature_zero_takes_the_first_of_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    drawn = draw_tokens(logits, settings(1, temperature=0.0))
    assert drawn.tokens.tolist() == [1]
    assert torch.equal(drawn.logprobs, token_logprobs(logits, torch.tensor([1])))


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 1000)
    whole = draw_tokens(logits, settings(9, top_p=0.9))
    for row in range(9):
        one = RowSettings(
            *(value[row : row + 1] if isinstance(value, torch.Tensor) else value for value in settings(9, top_p=0.9))
        )
        alone = draw_tokens(logits[row : row + 1], one)
        assert torch.equal(alone.tokens, whole.tokens[row : row + 1])
        assert torch.equal(alone.logprobs, whole.logprobs[row : row + 1])


def test_a_mask_bars_tokens_whose_bit_is_off() -> None:
    logits = torch.zeros(3, 40)
    mask_tokens(logits, torch.tensor([2, 0]), torch.tensor([[-1, 1], [1 << 31, 0]], dtype=torch.int64).to(torch.int32))
    assert (logits[2] == 0).nonzero().flatten().tolist() == list(range(33))
    assert (logits[0] == 0).nonzero().flatten().tolist() == [31]
    assert (logits[1] == 0).all()


def test_the_triton_kernels_are_the_reference() -> None:
    interpret(CHECK)
