"""Saving and loading in one process: what comes back, what does not fit, what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from piledriver.checkpoint import (
    Checkpointer,
    Contents,
    checkpoints,
    folder_for,
    is_complete,
    latest,
    load,
    next_number,
    read_header,
    rotate_checkpoints,
    save,
    verify,
)
from piledriver.checkpoint.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    StateMismatchError,
    UnsupportedStateError,
)
from piledriver.checkpoint.opened_checkpoint import open_checkpoint
from piledriver.checkpoint.tensor_index import TensorIndexReader
from piledriver.core.errors import UsageError
from tests.checkpoint.runs import make_run, train, whole


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_was_loaded_goes_on_like_the_one_that_was_saved(tmp_path: Path, asynchronous: bool) -> None:
    run = make_run(0)
    train(run, 3)
    saver = Checkpointer()
    folder = saver.save(
        tmp_path / "c", run.contents, step=3, layout={"data": 1}, extra={"epoch": 1}, asynchronous=asynchronous
    )
    losses = train(run, 3, start=3)
    saver.wait()
    other = make_run(9)
    report = load(folder, other.contents)
    assert (report.step, report.layout, report.extra) == (3, {"data": 1}, {"epoch": 1})
    assert report.exact
    assert train(other, 3, start=3) == losses
    assert equal(whole(run), whole(other))
    assert other.counter.seen == 6


def test_random_generators_go_on(tmp_path: Path) -> None:
    save(tmp_path, Contents())
    drawn = (torch.rand(3), np.random.random(), random.random())
    load(tmp_path, Contents())
    assert torch.equal(torch.rand(3), drawn[0])
    assert (np.random.random(), random.random()) == drawn[1:]


def test_everything_else_that_has_a_state(tmp_path: Path) -> None:
    class Loader:
        def __init__(self, at: int) -> None:
            self.state = {"at": at, "generator": torch.Generator().manual_seed(at).get_state()}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    class WithExtra(nn.Linear):
        seen = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    def contents(at: int) -> Contents:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**at)
        scaler.scale(torch.ones(1))
        model = WithExtra(2, 2)
        model.seen = at
        second = nn.Linear(1, 1)
        optimizers = [torch.optim.SGD(model.parameters(), lr=at), torch.optim.Adam(second.parameters(), lr=0.1)]
        return Contents(
            models=[model, second],
            optimizers=optimizers,
            loaders=[Loader(at), object()],
            scaler=scaler,
            per_rank={"noise": Loader(at + 1)},
        )

    first, second = contents(3), contents(5)
    save(tmp_path, first)
    assert load(tmp_path, second).exact
    assert second.models[0].seen == 3
    assert second.scaler.get_scale() == 8.0
    assert second.loaders[0].state["at"] == 3
    assert torch.equal(second.loaders[0].state["generator"], first.loaders[0].state["generator"])
    assert second.per_rank["noise"].state["at"] == 4
    assert second.optimizers[0].param_groups[0]["lr"] == 3
    only = contents(7)
    load(tmp_path, only, only={"models"})
    assert only.models[0].seen == 3
    assert only.loaders[0].state["at"] == 7
    with pytest.raises(UsageError, match="unknown kind 'model'"):
        load(tmp_path, only, only={"model"})


def test_float32_states_of_bfloat16_weights_and_tensor_learning_rates(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 3).bfloat16()
        return model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), foreach=False, capturable=False)

    model, optimizer = make()
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.full(parameter.shape, 1 + 2**-20),
            "exp_avg_sq": torch.ones(parameter.shape),
        }
    save(tmp_path, Contents(models=[model], optimizers=[optimizer]))
    other, second = make()
    second.param_groups[0]["lr"] = torch.tensor(0.1)
    load(tmp_path, Contents(models=[other], optimizers=[second]))
    state = second.state[next(iter(other.parameters()))]
    assert state["exp_avg"].dtype == torch.float32
    assert torch.all(state["exp_avg"] == 1 + 2**-20)
    assert second.param_groups[0]["lr"] == torch.tensor(0.5)


def test_every_dtype_and_odd_shape(tmp_path: Path) -> None:
    class Holder(nn.Module):
        def __init__(self, value: int) -> None:
            super().__init__()
            for i, dtype in enumerate(
                [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex128]
            ):
                self.register_buffer(f"b{i}", torch.full((2, 3), value).to(dtype).t())
            self.register_buffer("scalar", torch.tensor(value))
            self.register_buffer("empty", torch.empty(0, 3))

    source, target = Holder(1), Holder(0)
    save(tmp_path, Contents(models=[source]))
    load(tmp_path, Contents(models=[target]))
    for name, buffer in source.named_buffers():
        assert torch.equal(target.get_buffer(name).to(torch.complex128), buffer.to(torch.complex128)), name


class TestMismatches:
    def test_a_strict_load_changes_nothing(self, tmp_path: Path) -> None:
        save(tmp_path, Contents(models=[nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))]))
        target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4), nn.Linear(1, 1))
        before = {key: value.clone() for key, value in target.state_dict().items()}
        with pytest.raises(StateMismatchError, match=r"2 missing \(models/0/2.bias.*reshaped \(models/0/1.weight"):
            load(tmp_path, Contents(models=[target]))
        assert equal(before, target.state_dict())

    def test_a_partial_load_says_what_fitted(self, tmp_path: Path) -> None:
        source = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
        optimizer = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
        source(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        save(tmp_path, Contents(models=[source], optimizers=[optimizer]))
        target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4), nn.Linear(1, 1))
        other = torch.optim.SGD(target.parameters(), lr=0.2, momentum=0.9)
        report = load(tmp_path, Contents(models=[target], optimizers=[other], rng=False), strict=False)
        assert report.matched == (
            "models/0/0.bias",
            "models/0/0.weight",
            "optimizers/0/0.bias",
            "optimizers/0/0.weight",
        )
        assert report.reshaped == {"models/0/1.weight": ((3, 2), (4, 2)), "models/0/1.bias": ((3,), (4,))}
        assert set(report.missing) >= {"models/0/2.weight", "models/0/2.bias"}
        assert torch.equal(target[0].weight, source[0].weight)
        assert torch.equal(
            other.state[target[0].weight]["momentum_buffer"], optimizer.state[source[0].weight]["momentum_buffer"]
        )
        assert target[1].weight not in other.state or not other.state[target[1].weight]

    def test_renamed_keys(self, tmp_path: Path) -> None:
        source = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
        save(tmp_path, Contents(models=[source]))
        target = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 3)})
        assert load(tmp_path, Contents(models=[target]), key_map={"0.": "body.", "1.": "head."}).exact
        assert torch.equal(target["head"].weight, source[1].weight)
        body = nn.Linear(2, 2)
        report = load(tmp_path, Contents(models=[body]), key_map=lambda key: key[2:] if key.startswith("0.") else None)
        assert report.exact
        assert torch.equal(body.weight, source[0].weight)

    def test_another_number_of_objects(self, tmp_path: Path) -> None:
        save(tmp_path, Contents(models=[nn.Linear(1, 1)]))
        with pytest.raises(StateMismatchError, match="missing \\(models/1"):
            load(tmp_path, Contents(models=[nn.Linear(1, 1), nn.Linear(1, 1)]))

    def test_meta_tensors(self, tmp_path: Path) -> None:
        with torch.device("meta"):
            empty = nn.Linear(1, 1)
        with pytest.raises(CheckpointError, match="meta device"):
            save(tmp_path / "a", Contents(models=[empty]))
        save(tmp_path / "b", Contents(models=[nn.Linear(1, 1)]))
        with pytest.raises(CheckpointError, match="to_empty"):
            load(tmp_path / "b", Contents(models=[empty]))


class TestFolders:
    def test_names_rotation_and_interrupted_ones(self, tmp_path: Path) -> None:
        assert latest(tmp_path / "none") is None
        for number in (0, 1, 2, 10):
            save(folder_for(tmp_path, number), Contents(), step=number)
        (tmp_path / "checkpoint_11").mkdir()
        (tmp_path / "checkpoint_12" / "data-0.partial").mkdir(parents=True)
        (tmp_path / "other").mkdir()
        assert latest(tmp_path) == tmp_path / "checkpoint_10"
        assert next_number(tmp_path) == 13
        assert [path.name for path in rotate_checkpoints(tmp_path, 2)] == ["checkpoint_0", "checkpoint_1"]
        assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint_2", "checkpoint_10"]
        with pytest.raises(UsageError, match="at least 1"):
            rotate_checkpoints(tmp_path, 0)
        save(folder_for(tmp_path, 20, "step-{}"), Contents(), total_limit=1)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_11", "other", "step-20"]

    def test_what_others_put_into_the_folder_stays(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        for step in (1, 2):
            save(tmp_path, Contents(models=[nn.Linear(1, 1)]), step=step)
        assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["data", "header.json", "notes.txt"]
        assert read_header(tmp_path).step == 2

    def test_a_url_is_refused(self) -> None:
        with pytest.raises(UsageError, match="local or mounted"):
            save("s3://bucket/x", Contents())


class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return save(tmp_path / "c", Contents(models=[nn.Linear(64, 64)]), step=1)

    def test_a_changed_byte(self, folder: Path) -> None:
        (file,) = folder.rglob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)
        assert is_complete(folder)
        for attempt in (lambda: verify(folder), lambda: load(folder, Contents(models=[nn.Linear(64, 64)]))):
            with pytest.raises(IncompleteCheckpointError, match="checksum differs"):
                attempt()

    @pytest.mark.parametrize("name", ["rank-00000.safetensors", "index.json", "state.json"])
    def test_a_file_that_is_cut_or_gone(self, folder: Path, name: str) -> None:
        (file,) = folder.rglob(name)
        file.write_bytes(file.read_bytes()[:-1])
        assert not is_complete(folder)
        with pytest.raises(IncompleteCheckpointError, match="bytes instead of"):
            load(folder, Contents(models=[nn.Linear(64, 64)]))
        file.unlink()
        with pytest.raises(IncompleteCheckpointError, match="is missing"):
            verify(folder)

    def test_a_changed_header(self, folder: Path) -> None:
        fields = json.loads((folder / "header.json").read_text())
        (folder / "header.json").write_text(json.dumps(fields | {"step": 2}))
        assert not is_complete(folder)
        with pytest.raises(IncompleteCheckpointError, match="damaged"):
            read_header(folder)

    def test_no_folder_and_no_header(self, tmp_path: Path) -> None:
        with pytest.raises(IncompleteCheckpointError, match="does not exist"):
            load(tmp_path / "x", Contents())
        with pytest.raises(IncompleteCheckpointError, match=r"has no header\.json"):
            load(tmp_path, Contents())


class TestAsynchronous:
    def test_training_may_change_what_is_being_written(self, tmp_path: Path) -> None:
        model = nn.Linear(300, 300)
        saver = Checkpointer()
        for step in range(4):
            with torch.no_grad():
                model.weight.fill_(step)
            saver.save(folder_for(tmp_path, step), Contents(models=[model]), asynchronous=True)
            with torch.no_grad():
                model.weight.fill_(-1)
        saver.close()
        for step in range(4):
            load(folder_for(tmp_path, step), Contents(models=[model]))
            assert torch.all(model.weight == step)

    def test_an_error_is_raised_by_the_next_call(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        saver = Checkpointer()
        for next_call in (saver.wait, lambda: saver.save(tmp_path / "good", Contents()), saver.close):
            saver.save(tmp_path / "file", Contents(), asynchronous=True)
            with pytest.raises(CheckpointError, match="asynchronous save failed"):
                next_call()
        saver.save(tmp_path / "good", Contents())
        assert is_complete(tmp_path / "good")

    def test_a_state_that_cannot_be_saved_is_refused_at_once(self, tmp_path: Path) -> None:
        class Odd:
            def state_dict(self) -> dict[str, Any]:
                return {"function": len}

        with pytest.raises(UnsupportedStateError, match="custom/0/function"):
            Checkpointer().save(tmp_path / "c", Contents(custom=[Odd()]), asynchronous=True)
        assert not (tmp_path / "c").exists()


def test_torch_reads_our_format_with_our_reader(tmp_path: Path) -> None:
    source = nn.Linear(3, 3)
    save(tmp_path, Contents(models=[source]))
    target = {"models/0/weight": torch.zeros(3, 3)}
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(
            target,
            storage_reader=TensorIndexReader(open_checkpoint(tmp_path, 0).index),
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=True,
        )
    assert torch.equal(target["models/0/weight"], source.weight)
