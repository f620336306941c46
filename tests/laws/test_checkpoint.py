"""Law 4: saved on n, loads on m. Plain and sharded (FSDP2) models and optimizers, one to four gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from piledriver.checkpoint import Checkpointer, Contents, load, read_header, save
from tests.checkpoint.processes import run as on_ranks
from tests.checkpoint.runs import make_run, train, whole

LAYOUTS = [(size, sharded) for size in (1, 2, 3, 4) for sharded in (False, True)]


def name(size: int, sharded: bool) -> str:
    return f"{'sharded' if sharded else 'plain'}-{size}"


def save_one(rank: int, root: str, size: int, sharded: bool) -> dict[str, Any] | None:
    run = make_run(1, sharded=sharded)
    train(run, 3)
    save(Path(root, name(size, sharded)), run.contents, step=3, layout={"data": size})
    state = whole(run) | {"losses": train(run, 2, start=3)}
    return state if rank == 0 else None


def load_all(rank: int, root: str, size: int, sharded: bool) -> dict[str, Any] | None:
    found = {}
    loader = Checkpointer()
    for saved_size, saved_sharded in LAYOUTS:
        # A tied weight has one optimizer state, two untied ones have two: the same kind of model is compared.
        if saved_sharded != sharded:
            continue
        source = name(saved_size, saved_sharded)
        run = make_run(2 + rank, sharded=sharded)
        report = loader.load(Path(root, source), run.contents)
        assert report.exact
        assert report.step == 3
        assert report.layout == {"data": saved_size}
        assert run.counter.seen == 3
        assert run.scheduler.last_epoch == 3
        found[source] = whole(run) | {"losses": train(run, 2, start=3)}
    loader.close()
    return found if rank == 0 else None


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_saved_on_n_loads_on_m(tmp_path: Path, sharded: bool) -> None:
    saved = {n: on_ranks(n, save_one, str(tmp_path), n, sharded)[0] for n in (1, 2, 3, 4)}
    for m in (1, 2, 3, 4):
        loaded = on_ranks(m, load_all, str(tmp_path), m, sharded)[0]
        for n, state in saved.items():
            other = loaded[name(n, sharded)]
            assert other.keys() == state.keys()
            for key, value in state.items():
                if key == "losses":
                    assert other[key] == pytest.approx(value, abs=1e-6)
                else:
                    assert torch.equal(other[key], value), f"{key} saved on {n}, loaded on {m}"


def load_across(rank: int, root: str) -> dict[str, torch.Tensor]:
    run = make_run(5 + rank, sharded=False)
    run.model[4].weight = torch.nn.Parameter(run.model[4].weight.detach().clone())
    report = load(root, run.contents, only={"models"})
    assert report.exact
    return {key: value.clone() for key, value in run.model.state_dict().items()}


@pytest.mark.slow
def test_a_sharded_save_loads_into_a_plain_model_and_writes_each_piece_once(tmp_path: Path) -> None:
    saved = on_ranks(3, save_one, str(tmp_path), 3, True)[0]
    folder = tmp_path / name(3, True)
    assert read_header(folder).world_size == 3
    weights = sum(value.nbytes for key, value in saved.items() if key != "losses")
    on_disk = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    # The rest is JSON headers; a second copy of the values would not fit in the difference.
    assert weights < on_disk < 2 * weights + 20_000
    for loaded in on_ranks(2, load_across, str(folder)):
        for key, value in loaded.items():
            assert torch.equal(value, saved[key])


class Mlp(nn.Module):
    """Splits evenly over the tensor axis, as torch wants it, and unevenly over the data axis."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


def two_axes(seed: int, tensor_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded over `data` and split over `tensor`; with one process neither."""
    model: nn.Module = Mlp(seed)
    if dist.is_initialized():
        sizes = (dist.get_world_size() // tensor_size, tensor_size)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.arange(24.0).reshape(4, 6) / 24).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def unsharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for key, value in found.items()
    }


def save_two_axes(rank: int, folder: str, tensor_size: int) -> tuple[dict[str, torch.Tensor], float]:
    model, optimizer = two_axes(1, tensor_size)
    step_once(model, optimizer)
    save(folder, Contents(models=[model], optimizers=[optimizer]))
    return unsharded(model, optimizer), step_once(model, optimizer)


def load_two_axes(rank: int, folder: str, tensor_size: int) -> tuple[dict[str, torch.Tensor], float]:
    model, optimizer = two_axes(2, tensor_size)
    assert load(folder, Contents(models=[model], optimizers=[optimizer])).exact
    return unsharded(model, optimizer), step_once(model, optimizer)


@pytest.mark.slow
def test_two_axes_load_in_other_layouts(tmp_path: Path) -> None:
    layouts = [(4, 2), (4, 4), (2, 2), (3, 1)]
    for i, (size, tensor_size) in enumerate(layouts):
        saved, loss = on_ranks(size, save_two_axes, str(tmp_path / str(i)), tensor_size)[0]
        alone, alone_loss = load_two_axes(0, str(tmp_path / str(i)), 1)
        other_size, other_tensor = layouts[i - 1]
        other, other_loss = on_ranks(other_size, load_two_axes, str(tmp_path / str(i)), other_tensor)[0]
        for key, value in saved.items():
            assert torch.equal(alone[key], value), key
            assert torch.equal(other[key], value), key
        assert loss == pytest.approx(alone_loss, abs=1e-6)
        assert loss == pytest.approx(other_loss, abs=1e-6)
