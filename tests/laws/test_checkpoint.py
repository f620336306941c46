"""Law 4: saved on n, loads on m. Plain and sharded (FSDP2) models and optimizers, one to four gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from piledriver.checkpoint import Checkpointer, load, read_header, save
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
