"""Linear layers with quantised weights on a GPU: the product with the weight that they stand for, for any batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from piledriver.kernels.linear import WeightKind, dequantise_weight, linear, quantise_weight
from piledriver.kernels.linear.integers.rows import integer_rows
from piledriver.kernels.registry import HAS_TRITON
from tests.engine.gpu import ON_GPU

pytestmark = [*ON_GPU, pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")]


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("columns", [2048, 4096, 768])
def test_products_are_those_of_the_dequantised_weight(kind: WeightKind, columns: int) -> None:
    torch.manual_seed(0)
    weight = quantise_weight(torch.randn(1000, columns, device="cuda", dtype=torch.bfloat16), kind)
    dense = dequantise_weight(weight, torch.float32)
    for rows in (1, 2, 7, 16, 40, 128, 300):
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        expected = F.linear(x.float(), dense)
        for invariant in (False, True):
            found = linear(x, weight, invariant=invariant).float()
            assert (found - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_few_rows_are_those_of_the_dequantised_weight(kind: WeightKind) -> None:
    torch.manual_seed(0)
    weight = quantise_weight(torch.randn(1000, 2048, device="cuda", dtype=torch.bfloat16), kind)
    x = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16)
    expected = F.linear(x.float(), dequantise_weight(weight, torch.float32))
    found = integer_rows(x, weight)
    assert (found.float() - expected).abs().max() < 0.01 * expected.abs().max()
    assert torch.equal(integer_rows(x[3:8], weight), found[3:8])
