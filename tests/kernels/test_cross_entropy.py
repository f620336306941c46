"""Kernels from logits to gradient give what the formula gives. `tests/models/test_loss.py` has the loss itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from piledriver.kernels.cross_entropy import chunked, chunked_cross_entropy, default_chunk_tokens
from piledriver.kernels.registry import KERNELS
from tests.engine.gpu import ON_GPU
from tests.kernels.interpreter import interpret

CHECK = """
import torch
from piledriver.kernels.cross_entropy.reference import ReferenceCrossEntropy
from piledriver.kernels.cross_entropy.triton import TritonCrossEntropy
torch.manual_seed(0)
for dtype, cap, z in ((torch.float32, None, 0.0), (torch.float32, 3.0, 0.01), (torch.bfloat16, None, 0.001)):
    logits, targets = (4 * torch.randn(9, 5000)).to(dtype), torch.randint(5000, (9,))
    targets[4] = -100
    expected, sums = ReferenceCrossEntropy()(logits.clone(), targets, -100, z, cap)
    found, found_sums = TritonCrossEntropy()(logits, targets, -100, z, cap)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4)
    torch.testing.assert_close(found_sums, sums)
    assert found is logits
    wide = torch.zeros(9, 5008, dtype=dtype)
    wide[:, :5000] = logits
    strided, _ = TritonCrossEntropy()(wide[:, :5000], targets, -100, z, cap)
    again, _ = TritonCrossEntropy()(logits, targets, -100, z, cap)
    torch.testing.assert_close(strided, again)
    assert not wide[:, 5000:].any()
    targets[2] = 5000  # outside the vocabulary
    assert TritonCrossEntropy()(logits, targets, -100, z, cap)[1][0].isnan()
"""


def test_the_triton_kernel_is_the_formula() -> None:
    interpret(CHECK)


class TestOnGpu:
    pytestmark = ON_GPU

    @pytest.mark.parametrize("name", ["triton", "compiled"])
    @pytest.mark.parametrize("softcap", [None, 3.0])
    def test_kernels_are_the_formula(self, name: str, softcap: float | None) -> None:
        torch.manual_seed(0)
        logits, targets = 4 * torch.randn(33, 5000), torch.randint(5000, (33,))
        targets[4] = -100
        expected, sums = KERNELS["cross_entropy"]["reference"]()(logits.clone(), targets, -100, 0.01, softcap)
        kernel = KERNELS["cross_entropy"][name]
        assert kernel.runs_on(torch.device("cuda"))
        found, found_sums = kernel()(logits.cuda(), targets.cuda(), -100, 0.01, softcap)
        torch.testing.assert_close(found.cpu(), expected, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(found_sums.cpu(), sums)

    def test_a_vocabulary_that_is_not_aligned(self) -> None:
        torch.manual_seed(0)
        hidden, weight = torch.randn(300, 64), torch.randn(1001, 64) / 8
        targets = torch.randint(1001, (300,))
        found = []
        for device in ("cpu", "cuda"):
            inputs = [x.to(device).requires_grad_() for x in (hidden, weight)]
            loss, _, _ = chunked_cross_entropy(*inputs, targets.to(device), chunk_tokens=128)
            found.append([x.cpu() for x in (loss.detach(), *torch.autograd.grad(loss, inputs))])
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_the_operator_keeps_its_contract() -> None:
    hidden, weight = torch.randn(20, 16, requires_grad=True), torch.randn(37, 16, requires_grad=True)
    targets = torch.randint(37, (20,))
    operator = torch.ops.piledriver.linear_cross_entropy.default
    torch.library.opcheck(operator, (hidden, weight, targets, -100, 1e-3, 5.0, 8, True, True))


def test_gradients_are_scaled_in_place_only_where_the_graph_ends() -> None:
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    targets = torch.randint(16, (6,))
    expected = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, targets), (hidden, weight))
    loss = chunked_cross_entropy(hidden, weight, targets)[0] / 6
    kept = [torch.autograd.grad(loss, (hidden, weight), retain_graph=retain) for retain in (True, True, False)]
    for found in kept:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_padded_rows_change_nothing(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(21, 16, requires_grad=True), torch.randn(37, 16, requires_grad=True)
    targets = torch.randint(37, (21,))
    expected, _, _ = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=8)
    gradients = torch.autograd.grad(expected, (hidden, weight))
    real = KERNELS["cross_entropy"]["reference"]()

    def over_the_logits(logits: torch.Tensor, *given: Any) -> Any:
        gradient, sums = real(logits, *given)
        return logits.copy_(gradient), sums

    monkeypatch.setattr(chunked, "needs_alignment", lambda _: True)
    if in_place:
        monkeypatch.setattr(chunked, "fastest_kernel", lambda *_: over_the_logits)
    found, _, _ = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=8)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight)), gradients)


def test_default_chunks() -> None:
    assert default_chunk_tokens(50304, "cuda") == 4096
    assert default_chunk_tokens(128256, "cuda") == 2048
    assert default_chunk_tokens(10**9, "cuda") == 1024
    # Large vocabularies: as many tokens as the gradient of the weight beside them allows.
    assert default_chunk_tokens(151936, "cuda", 1024) == 1792
    assert default_chunk_tokens(262144, "cuda", 5376) == 2048
    assert default_chunk_tokens(50304, "cuda", 4096) == 4096
    assert [chunked._even_chunks(tokens, 1792) for tokens in (0, 5, 8192, 16384)] == [1, 16, 1648, 1648]
    assert default_chunk_tokens(10**9, "cpu") == 64
