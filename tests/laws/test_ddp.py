"""Laws 1, 2, 4 and 8 for one copy of the model per process, on 1 to 4 processes.

One launch per number of processes holds all of them: starting processes costs more than what they do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from piledriver.accelerator import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from piledriver.accelerator.errors import NotPreparedError
from piledriver.accelerator.options.handlers import DDPCommunicationHookType
from piledriver.engine.data_parallel.local_sgd import LocalSGD
from piledriver.engine.state import state_of
from piledriver.runtime.collectives.operations import gather_object
from piledriver.runtime.errors import DisagreementError
from tests.checkpoint.processes import run as on_ranks

GLOBAL_BATCH = 12
STEPS = 6


class TwoTowers(nn.Module):
    """Small, with a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def _parts(seed: int = 0) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(seed)
    model = TwoTowers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(GLOBAL_BATCH * STEPS, 4, generator=generator),
        torch.randn(GLOBAL_BATCH * STEPS, 1, generator=generator),
    )
    order = torch.Generator().manual_seed(9)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH, shuffle=True, generator=order)
    return model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def _train(accelerator: Accelerator, ready: tuple[Any, ...], save: dict[int, str] | None = None) -> list[float]:
    model, optimizer, loader, scheduler = ready
    losses = []
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if save and step + 1 in save:
            accelerator.save_state(save[step + 1])
    return losses


def _accelerator(**options: Any) -> Accelerator:
    return Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True), **options)


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def _same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def _laws(_rank: int, folder: str, previous: str | None) -> None:
    # Law 1, and law 8: losses of this number of processes, scheduler steps counted.
    accelerator = _accelerator()
    world = accelerator.world
    keys = list(TwoTowers().state_dict())
    # Replicas begin as rank 0's, whatever the others were built with.
    ready = accelerator.prepare(*_parts(seed=world.rank))
    middle = str(Path(folder) / "middle")
    losses = _train(accelerator, ready, save={3: middle})
    model, _, _, scheduler = ready
    assert list(model.state_dict()) == keys
    assert model.second.weight is model.first.weight
    assert scheduler.scheduler.last_epoch == STEPS
    final = _weights(model)
    assert all(_same(final, other) for other in gather_object(world, final))

    # Law 2: what was saved in the middle and loaded into new objects ends with the same bits.
    again = _accelerator()
    resumed = again.prepare(*_parts(seed=77))
    again.load_state(middle)
    _train(again, resumed)
    assert _same(_weights(resumed[0]), final)

    # Law 4: what another number of processes saved loads here.
    if previous is not None:
        other = _accelerator()
        loaded = other.prepare(*_parts(seed=78))
        other.load_state(previous)
        everyone = gather_object(world, _weights(loaded[0]))
        assert all(_same(everyone[0], one) for one in everyone)
        expected = torch.load(Path(previous).parent / "at_middle.pt")
        assert _same(_weights(loaded[0]), expected)
    at_middle = _accelerator()
    halfway = at_middle.prepare(*_parts(seed=79))
    at_middle.load_state(middle)
    if world.is_main:
        torch.save(_weights(halfway[0]), Path(folder) / "at_middle.pt")
        torch.save(final, Path(folder) / "final.pt")
        (Path(folder) / "losses.json").write_text(json.dumps(losses))
    _exact_windows(world.size)
    if world.size == 2:
        _only_with_two()


def _exact_windows(processes: int) -> None:
    """Counted windows give the gradient of one process with all items at once, whoever holds them."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1 + (7 * i) % 5 for i in range(2 * processes)]
    items = [torch.randn(length, 4, generator=generator) for length in lengths]
    torch.manual_seed(0)
    reference = TwoTowers()
    reference(torch.cat(items)).square().mean().backward()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = accelerator.prepare(TwoTowers())
    for window in range(2):
        batch = items[2 * accelerator.process_index + window]
        with accelerator.accumulate(model, count=len(batch)):
            accelerator.backward(model(batch).square().mean())
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def _only_with_two() -> None:
    accelerator = _accelerator()
    rank = accelerator.process_index
    assert accelerator.num_processes == 2, "the group that a script created itself, without a launcher's environment"
    with pytest.raises(NotPreparedError):
        accelerator.backward(torch.ones(1, requires_grad=True).sum())
    with pytest.raises(DisagreementError, match="rank 1 differs from the others in prepare"):
        accelerator.prepare(nn.Linear(2, 2 + rank))
    # PowerSGD and half-precision gradients go through the same reducer. (gloo has no bfloat16 sum.)
    for hook in (DDPCommunicationHookType.FP16, DDPCommunicationHookType.POWER_SGD):
        handler = DistributedDataParallelKwargs(comm_hook=hook)
        torch.manual_seed(0)
        model = Accelerator(kwargs_handlers=[handler]).prepare(nn.Linear(3, 1))
        model(torch.full((1, 3), float(rank))).sum().backward()
        torch.testing.assert_close(model.weight.grad, torch.full((1, 3), 0.5), atol=1e-3, rtol=1e-3)
    # Local steps drift apart and are averaged.
    model = accelerator.prepare(nn.Linear(1, 1))
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for _ in range(2):
            with torch.no_grad():
                model.bias.add_(float(rank))
            local.step()
    biases = gather_object(accelerator.world, model.bias.item())
    assert biases[0] == biases[1]
    # One process has more data than the other.
    uneven = Accelerator()
    joined = uneven.prepare(nn.Linear(1, 1))
    with uneven.join_uneven_inputs([joined]):
        for _ in range(2 + rank):
            uneven.backward(joined(torch.ones(1, 1)).sum())
    uneven.free_memory()
    assert state_of(joined) is None


@pytest.mark.slow
def test_laws_hold_on_one_to_four_processes(tmp_path: Path) -> None:
    previous = None
    losses, finals = {}, {}
    for processes in (1, 2, 3, 4):
        folder = tmp_path / str(processes)
        folder.mkdir()
        on_ranks(processes, _laws, str(folder), previous)
        previous = str(folder / "middle")
        losses[processes] = json.loads((folder / "losses.json").read_text())
        finals[processes] = torch.load(folder / "final.pt")
    for processes in (2, 3, 4):
        assert losses[processes] == pytest.approx(losses[1], rel=1e-5)
        for key, value in finals[1].items():
            torch.testing.assert_close(finals[processes][key], value, rtol=1e-4, atol=1e-6)
