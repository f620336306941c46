"""Quantisation on a GPU gives the model that it gives on a CPU."""

from __future__ import annotations

import pytest
import torch

from piledriver import compress
from piledriver.compress.quantise import Method
from piledriver.models import ModelConfig, Transformer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_codes_and_kernels_agree_with_the_reference(method: Method) -> None:
    shape = ModelConfig(vocab_size=61, dim=256, layers=2, heads=4, mlp_dim=512, max_positions=256)
    model = Transformer(shape).to("cuda", torch.bfloat16).requires_grad_(False)
    tokens = torch.randint(61, (8, 200), generator=torch.Generator().manual_seed(0))
    small = compress.quantise(model, "w4a16-g128", method=method, data=tokens)
    for rows in (1, 8):  # kernels of few rows, and dequantised products of many
        here = small(tokens[:rows].cuda()).float().cpu()
        there = small.cpu()(tokens[:rows]).float()
        small.cuda()
        torch.testing.assert_close(here, there, rtol=0.05, atol=0.05 * float(there.abs().max()))
