"""What needs a CUDA device: fp16 with its scaler, bf16, the mixed process group's device choice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from piledriver.accelerator import Accelerator
from tests.engine.gpu import ON_GPU

pytestmark = ON_GPU


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_training_in_half_precision(precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=precision)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    x, y = torch.randn(64, 4, device=accelerator.device), torch.randn(64, 1, device=accelerator.device)
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert norm < 100, "gradients must be unscaled before they are measured"
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert scheduler.scheduler.last_epoch + int(optimizer.step_was_skipped) <= 20
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")


def test_an_overflow_skips_the_step_and_the_scheduler() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).sum())
    model.weight.grad[0, 0] = float("inf")
    optimizer.step()
    scheduler.step()
    assert optimizer.step_was_skipped
    assert accelerator.optimizer_step_was_skipped
    assert torch.equal(model.weight, before)
    assert scheduler.scheduler.last_epoch == 0
