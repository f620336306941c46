"""Our own models through an Accelerator without a layout."""

from __future__ import annotations

import pytest
import torch

from piledriver.accelerator import Accelerator
from tests.laws.test_layouts import VOCAB, make_model


@pytest.mark.parametrize("kind", ["transformer", "tied", "moe"])
def test_bf16_trains_like_fp32(kind: str) -> None:
    losses = {}
    for precision in ("no", "bf16"):
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = make_model(kind)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        tokens = torch.arange(68).view(4, 17) % VOCAB
        for _ in range(5):
            sums = model(tokens[:, :-1], tokens[:, 1:])
            accelerator.backward(sums.total / sums.tokens)
            optimizer.step()
            optimizer.zero_grad()
        losses[precision] = float(sums.total.detach() / sums.tokens)
        assert accelerator.unwrap_model(model, keep_fp32_wrapper=False).compute_dtype is None
    assert losses["bf16"] == pytest.approx(losses["no"], rel=2e-2)
