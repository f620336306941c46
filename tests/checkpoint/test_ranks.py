"""Several ranks: behind the training, with other layers on each, with states of their own, and when one fails."""

from __future__ import annotations

import os
import random
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piledriver.checkpoint import Checkpointer, Contents, folder_for, is_complete, latest, load, read_header, save
from piledriver.core.errors import PiledriverError
from tests.checkpoint.processes import run as on_ranks
from tests.checkpoint.runs import make_run, train, whole

pytestmark = pytest.mark.slow


def saves_while_training(rank: int, root: str, sharded: bool) -> list[dict[str, torch.Tensor]]:
    run = make_run(0, sharded=sharded)
    saver = Checkpointer()
    states = []
    for step in range(4):
        # Training's own collectives run on the default group while the save talks on its side group.
        train(run, 2, start=2 * step)
        saver.save(folder_for(root, step), run.contents, step=step, asynchronous=True, total_limit=3)
        states.append(whole(run))
    saver.close()
    return states if rank == 0 else []


@pytest.mark.parametrize("sharded", [False, True])
def test_an_asynchronous_save_behind_the_training(tmp_path: Path, sharded: bool) -> None:
    states = on_ranks(3, saves_while_training, str(tmp_path), sharded)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]
    for step in (1, 2, 3):
        run = make_run(7)
        if sharded:
            run.model[4].weight = nn.Parameter(run.model[4].weight.detach().clone())
        load(folder_for(tmp_path, step), run.contents, only={"models"})
        for key, value in run.model.state_dict().items():
            assert torch.equal(value, states[step][key])


def stage(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The layers of one pipeline stage, under the names that they have in the whole model."""
    model = nn.ModuleDict({str(rank): nn.Linear(3, 3)})
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def fill(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in model.named_parameters():
        value = float(name[0]) + (0.5 if "bias" in name else 0.0)
        parameter.data.fill_(value)
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full_like(parameter, value + 10),
            "exp_avg_sq": torch.full_like(parameter, value + 20),
        }


def check_filled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in model.named_parameters():
        value = float(name[0]) + (0.5 if "bias" in name else 0.0)
        assert torch.all(parameter == value), name
        assert torch.all(optimizer.state[parameter]["exp_avg_sq"] == value + 20), name
        assert optimizer.state[parameter]["step"] == 3


def save_stages(rank: int, folder: str) -> None:
    model, optimizer = stage(rank)
    fill(model, optimizer)
    save(folder, Contents(models=[model], optimizers=[optimizer]))


def load_stages(rank: int, folder: str) -> None:
    model, optimizer = stage(rank)
    assert load(folder, Contents(models=[model], optimizers=[optimizer])).exact
    check_filled(model, optimizer)


def test_pipeline_stages_and_the_whole_model_are_one_format(tmp_path: Path) -> None:
    on_ranks(3, save_stages, str(tmp_path / "stages"))
    whole_model = nn.ModuleDict({str(i): nn.Linear(3, 3) for i in range(3)})
    optimizer = torch.optim.Adam(whole_model.parameters(), lr=0.1)
    assert load(tmp_path / "stages", Contents(models=[whole_model], optimizers=[optimizer])).exact
    check_filled(whole_model, optimizer)
    save(tmp_path / "whole", Contents(models=[whole_model], optimizers=[optimizer]))
    on_ranks(3, load_stages, str(tmp_path / "whole"))


class Loader:
    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def save_own(rank: int, folder: str) -> float:
    random.seed(rank)
    contents = Contents(loaders=[Loader(cursor=5)], per_rank={"noise": Loader(rank=rank)})
    save(folder, contents)
    return random.random()


def load_own(rank: int, folder: str, strict: bool) -> tuple[Any, Any, float, tuple[str, ...], tuple[str, ...]]:
    random.seed(100)
    loader, noise = Loader(), Loader()
    report = load(folder, Contents(loaders=[loader], per_rank={"noise": noise}), strict=strict)
    return loader.state, noise.state, random.random(), report.missing, report.notes


def test_states_of_each_rank(tmp_path: Path) -> None:
    drawn = on_ranks(2, save_own, str(tmp_path))
    for rank, (loader, noise, number, missing, notes) in enumerate(on_ranks(2, load_own, str(tmp_path), True)):
        assert (loader, noise, number) == ({"cursor": 5}, {"rank": rank}, drawn[rank])
        assert (missing, notes) == ((), ())
    loaded = on_ranks(3, load_own, str(tmp_path), False)
    # The loader's cursor was the same everywhere, so the third rank has it; what was each rank's own, it has not.
    assert [item[0] for item in loaded] == [{"cursor": 5}] * 3
    assert [item[2] for item in loaded[:2]] == drawn
    assert loaded[2][3] == ("per_rank/noise",)
    assert "saved by 2 ranks" in loaded[2][4][0]


class Failing(Loader):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state today")


def one_fails(rank: int, folder: str) -> str:
    saver = Checkpointer()
    try:
        saver.save(folder, Contents(custom=[Failing() if rank == 1 else Loader()]))
    except (PiledriverError, ValueError) as error:
        saver.save(folder, Contents(custom=[Loader()]), step=2)
        saver.close()
        return str(error)
    return "saved"


def test_a_rank_that_fails_stops_all_with_its_name(tmp_path: Path) -> None:
    messages = on_ranks(3, one_fails, str(tmp_path / "c"))
    assert messages[1] == "no state today"
    assert all("failed on rank 1: ValueError: no state today" in messages[rank] for rank in (0, 2))
    assert read_header(tmp_path / "c").step == 2


def one_dies(rank: int, root: str) -> str:
    saver = Checkpointer(timeout=timedelta(seconds=20))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    saver.save(folder_for(root, 0), Contents(models=[model]), step=0)
    if rank == 1:
        os.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
    saver.save(folder_for(root, 1), Contents(models=[model]), step=1, asynchronous=True)
    try:
        saver.wait()
    except PiledriverError as error:
        return str(error)
    return "saved"


def test_a_rank_that_dies_in_a_save_leaves_an_error_and_the_last_good_one(tmp_path: Path) -> None:
    message, _ = on_ranks(2, one_dies, str(tmp_path), dying={1})
    assert "asynchronous save failed" in message
    assert latest(tmp_path) == folder_for(tmp_path, 0)
    assert not is_complete(folder_for(tmp_path, 1))
