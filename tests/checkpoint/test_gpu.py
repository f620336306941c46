"""On a CUDA device: pinned copies, device generators, states that come back where they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from piledriver.checkpoint import Checkpointer, Contents, folder_for, load, save, save_model
from piledriver.checkpoint.saving.staging import HostStaging

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make(seed: int, **options: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(8, 64, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_copies_are_pinned_and_complete_when_the_call_returns() -> None:
    staging = HostStaging()
    source = torch.zeros(50_000_000, device="cuda")
    for value in (1.0, 2.0):
        source.fill_(value)
        ((_, copy),) = staging.copies([("x", source)])
        source.fill_(-1.0)
        assert copy.is_pinned()
        assert torch.all(copy == value)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_a_run_with_dropout_goes_on_exactly(tmp_path: Path, options: dict[str, bool]) -> None:
    model, optimizer = make(0, **options)
    train(model, optimizer, 3)
    saver = Checkpointer()
    saver.save(folder_for(tmp_path, 0), Contents(models=[model], optimizers=[optimizer]), asynchronous=True)
    losses = train(model, optimizer, 3)
    saver.wait()
    other, second = make(1, **options)
    assert load(folder_for(tmp_path, 0), Contents(models=[other], optimizers=[second])).exact
    assert train(other, second, 3) == losses
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert b.is_cuda
        assert torch.equal(a, b)


def test_from_the_device_to_the_host_and_to_safetensors(tmp_path: Path) -> None:
    model, optimizer = make(0)
    train(model, optimizer, 1)
    save(tmp_path / "c", Contents(models=[model], optimizers=[optimizer]))
    on_host = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    second = torch.optim.AdamW(on_host.parameters(), lr=0.01)
    load(tmp_path / "c", Contents(models=[on_host], optimizers=[second], rng=False))
    assert torch.equal(on_host[0].weight, model[0].weight.cpu())
    assert not second.state[on_host[0].weight]["exp_avg"].is_cuda
    save_model(model, tmp_path / "m")
    assert (tmp_path / "m/model.safetensors").stat().st_size > 2 * 64 * 64 * 4
