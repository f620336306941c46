"""Kernels from logits to gradient give what the formula gives. `tests/models/test_loss.py` has the loss itself."""

from __future__ import annotations

import pytest
import torch

from piledriver.kernels.cross_entropy import default_chunk_tokens
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


def test_the_operator_keeps_its_contract() -> None:
    hidden, weight = torch.randn(20, 16, requires_grad=True), torch.randn(37, 16, requires_grad=True)
    targets = torch.randint(37, (20,))
    operator = torch.ops.piledriver.linear_cross_entropy.default
    torch.library.opcheck(operator, (hidden, weight, targets, -100, 1e-3, 5.0, 8, True, True))


def test_default_chunks() -> None:
    assert default_chunk_tokens(50304, "cuda") == 4096
    assert default_chunk_tokens(128256, "cuda") == 4096
    assert default_chunk_tokens(10**9, "cpu") == 64
