"""Other people's formats: Hugging Face shards, Accelerate's folders, torch's DCP; safely, and the command line."""

from __future__ import annotations

import enum
import importlib.util
import json
import os
import pickle
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard

from piledriver.checkpoint import Contents, convert, is_accelerate_folder, load, load_model, merge, save, save_model
from piledriver.checkpoint.errors import (
    IncompleteCheckpointError,
    StateMismatchError,
    UntrustedFileError,
)
from piledriver.cli import main as cli
from piledriver.core.byte_size import BadSizeError, parse_size
from piledriver.core.errors import UnknownNameError
from tests.checkpoint.processes import run as on_ranks
from tests.checkpoint.runs import cpu_mesh, make_run, train, whole


def tied(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


class Evil:
    """A pickle that would leave a file behind if anything ran it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class TestHuggingFace:
    @pytest.mark.parametrize("limit", ["10GB", 150, "0.1KB"])
    @pytest.mark.parametrize("safe", [True, False])
    def test_there_and_back(self, tmp_path: Path, limit: int | str, safe: bool) -> None:
        model = tied(0)
        for _ in range(2):  # the second time over the first
            files = save_model(model, tmp_path, max_shard_size=limit, safe_serialization=safe)
        names = sorted(path.name for path in tmp_path.iterdir())
        stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
        if limit == "10GB":
            assert names == [f"{stem}.{ending}"]
        else:
            assert len(files) > 1
            assert f"{stem}-00001-of-{len(files):05d}.{ending}" in names
            index = json.loads((tmp_path / f"{stem}.{ending}.index.json").read_text())
            assert index["metadata"]["total_size"] == (8 * 4 + 4 * 4 + 4) * 4
            assert set(index["weight_map"].values()) == {file.name for file in files}
        other = tied(1)
        assert load_model(other, tmp_path).exact
        assert same(model, other)

    def test_the_files_are_what_others_read(self, tmp_path: Path) -> None:
        model = tied(0)
        save_model(model, tmp_path)
        found = load_file(tmp_path / "model.safetensors")
        assert set(found) == {"0.weight", "1.weight", "1.bias"}
        assert torch.equal(found["1.bias"], model[1].bias)

    def test_fewer_shards_leave_no_old_ones(self, tmp_path: Path) -> None:
        save_model(tied(0), tmp_path, max_shard_size=64)
        save_model(tied(1), tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]

    @pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
    @pytest.mark.slow
    def test_transformers_reads_the_shards(self, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers import GPT2Config, GPT2LMHeadModel

            config = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=11, n_positions=8)
            model = GPT2LMHeadModel(config)
            config.save_pretrained(tmp_path)
            save(tmp_path / "checkpoint", Contents(models=[model]))
            assert len(merge(tmp_path / "checkpoint", tmp_path, max_shard_size="1KB")) > 1
            other = GPT2LMHeadModel.from_pretrained(tmp_path)
        assert same(model, other)

    def test_merge_converts_and_keeps_ties(self, tmp_path: Path) -> None:
        model = tied(0)
        model.register_buffer("count", torch.tensor(7))
        save(tmp_path / "c", Contents(models=[nn.Linear(1, 1), model]))
        merge(tmp_path / "c", tmp_path / "m", model=1, dtype="bfloat16")
        found = load_file(tmp_path / "m/model.safetensors")
        assert {key: value.dtype for key, value in found.items()} == {
            "0.weight": torch.bfloat16,
            "1.weight": torch.bfloat16,
            "1.bias": torch.bfloat16,
            "count": torch.int64,
        }
        other = tied(1)
        other.register_buffer("count", torch.tensor(0))
        assert load_model(other, tmp_path / "m").exact
        assert torch.equal(other[2].weight, model[0].weight.bfloat16().float())

    def test_sizes(self) -> None:
        assert [parse_size(size) for size in ("5GB", "10gb", "1MiB", "100", 7)] == [5 * 10**9, 10**10, 2**20, 100, 7]
        with pytest.raises(BadSizeError, match="'five'"):
            parse_size("five")

    def test_damaged_folders(self, tmp_path: Path) -> None:
        model = tied(0)
        with pytest.raises(IncompleteCheckpointError, match="holds no weights"):
            load_model(model, tmp_path)
        save_model(model, tmp_path, max_shard_size=64)
        (tmp_path / "model-00001-of-00003.safetensors").unlink()
        with pytest.raises(IncompleteCheckpointError, match="does not exist"):
            load_model(model, tmp_path)
        (tmp_path / "x.safetensors").write_bytes(b"\xff" * 20)
        with pytest.raises(IncompleteCheckpointError, match="truncated, or no safetensors file"):
            load_model(model, tmp_path / "x.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../x.safetensors"}}')
        with pytest.raises(IncompleteCheckpointError, match="outside its folder"):
            load_model(model, tmp_path)


def sharded(rank: int, folder: str) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + i)
    fully_shard(model, mesh=cpu_mesh())
    save_model(model, folder, max_shard_size=100)
    other = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(other, mesh=cpu_mesh())
    assert load_model(other, folder).exact
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())


@pytest.mark.slow
def test_sharded_models_to_safetensors_and_back(tmp_path: Path) -> None:
    on_ranks(3, sharded, str(tmp_path))
    weight = {k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}["0.weight"]
    assert torch.equal(weight, torch.arange(35.0).reshape(7, 5))


def write_accelerate_folder(folder: Path, run: Any, *, safe: bool = True) -> None:
    """What `Accelerator.save_state` of Accelerate 1.15 writes."""
    folder.mkdir(exist_ok=True)
    state = run.model.state_dict()
    if safe:
        save_file({k: v for k, v in state.items() if k != "4.weight"}, folder / "model.safetensors", {"format": "pt"})
    else:
        torch.save(state, folder / "pytorch_model.bin")
    torch.save(run.optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(run.scheduler.state_dict(), folder / "scheduler.bin")
    torch.save({"scale": 8.0, "growth_factor": 2.0}, folder / "scaler.pt")
    torch.save({"seen": 4, "average": torch.ones(3), "shape": (1, 2), 7: {"x"}}, folder / "custom_checkpoint_0.pkl")
    states = {
        "step": 17,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(states, folder / "random_states_0.pkl")


class TestAccelerate:
    @pytest.mark.parametrize("safe", [True, False])
    def test_a_run_goes_on_from_their_folder(self, tmp_path: Path, safe: bool) -> None:
        run = make_run(0)
        train(run, 3)
        write_accelerate_folder(tmp_path, run, safe=safe)
        drawn = (torch.rand(2), np.random.random(), random.random())
        assert is_accelerate_folder(tmp_path)
        other = make_run(5)
        report = load(tmp_path, other.contents)
        assert report.exact
        assert report.step == 17
        assert torch.equal(torch.rand(2), drawn[0])
        assert (np.random.random(), random.random()) == drawn[1:]
        assert other.counter.seen == 4
        assert train(run, 2, start=3) == train(other, 2, start=3)
        assert all(torch.equal(value, whole(other)[key]) for key, value in whole(run).items())

    def test_and_from_a_converted_one(self, tmp_path: Path) -> None:
        run = make_run(0)
        train(run, 3)
        write_accelerate_folder(tmp_path / "theirs", run)
        convert(tmp_path / "theirs", tmp_path / "ours")
        other = make_run(5)
        assert load(tmp_path / "ours", other.contents).step == 17
        assert train(run, 2, start=3) == train(other, 2, start=3)

    @pytest.mark.parametrize(
        "name", ["optimizer.bin", "pytorch_model.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl"]
    )
    def test_code_in_their_files_is_not_run(self, tmp_path: Path, name: str) -> None:
        run = make_run(0)
        write_accelerate_folder(tmp_path, run, safe=False)
        torch.save({"x": Evil(tmp_path / "pwned")}, tmp_path / name)
        with pytest.raises(UntrustedFileError, match="was not read"):
            load(tmp_path, run.contents)
        assert not (tmp_path / "pwned").exists()

    def test_a_pickled_sampler_gives_its_numbers_and_nothing_else(self, tmp_path: Path) -> None:
        class SeedableRandomSampler:
            def __init__(self) -> None:
                self.epoch = 3
                self.initial_seed = 42
                self.trap = Evil(tmp_path / "pwned")

        run = make_run(0)
        write_accelerate_folder(tmp_path, run)
        globals()["SeedableRandomSampler"] = SeedableRandomSampler
        SeedableRandomSampler.__qualname__ = "SeedableRandomSampler"
        torch.save(SeedableRandomSampler(), tmp_path / "sampler.bin")
        report = load(tmp_path, run.contents)
        assert report.extra["samplers"] == [{"epoch": 3, "initial_seed": 42}]
        assert not (tmp_path / "pwned").exists()

    @pytest.mark.slow
    @pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
    def test_a_folder_that_accelerate_itself_wrote(self, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from accelerate import Accelerator

            run = make_run(0)
            accelerator = Accelerator(cpu=True)
            accelerator.prepare(run.model, run.optimizer, run.scheduler)
            accelerator.register_for_checkpointing(run.counter)
            train(run, 3)
            accelerator.save_state(str(tmp_path))
        other = make_run(5)
        assert load(tmp_path, other.contents).exact
        assert other.counter.seen == 3
        assert train(run, 2, start=3) == pytest.approx(train(other, 2, start=3))


class TestStockDcp:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        self.model = nn.Linear(3, 4)
        with pytest.warns(UserWarning, match="single process"):
            dcp_save(
                {"model": self.model.state_dict(), "step": 3},
                storage_writer=FileSystemWriter(tmp_path / "dcp"),
                no_dist=True,
            )
        return tmp_path / "dcp"

    def test_its_tensors_load(self, folder: Path) -> None:
        other = nn.Linear(3, 4)
        assert load_model(other, folder, key_map={"model.": ""}).exact
        assert same(self.model, other)
        with pytest.raises(StateMismatchError, match="unexpected"):
            load_model(other, folder)

    def test_an_index_that_python_3_11_2_wrote_loads(self, folder: Path) -> None:
        """That Python pickles an enum's member as `getattr(class, name)`."""

        class Pickler(pickle.Pickler):
            def reducer_override(self, value: Any) -> Any:
                return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented

        index = pickle.loads((folder / ".metadata").read_bytes())
        with (folder / ".metadata").open("wb") as file:
            Pickler(file).dump(index)
        assert b"getattr" in (folder / ".metadata").read_bytes()
        other = nn.Linear(3, 4)
        assert load_model(other, folder, key_map={"model.": ""}).exact
        assert same(self.model, other)

    @pytest.mark.parametrize("name", ["__class__", "__init__", "mro"])
    def test_no_other_attribute_is_read(self, folder: Path, name: str) -> None:
        records = "torch.distributed.checkpoint.metadata"
        for of in ("_MEM_FORMAT_ENCODING", "Metadata"):
            (folder / ".metadata").write_bytes(f"cbuiltins\ngetattr\n(c{records}\n{of}\nV{name}\ntR.".encode())
            with pytest.raises(UntrustedFileError, match=r"asks for builtins\.getattr"):
                load_model(nn.Linear(3, 4), folder)

    def test_code_in_its_index_is_not_run(self, folder: Path) -> None:
        (folder / ".metadata").write_bytes(pickle.dumps(Evil(folder / "pwned")))
        with pytest.raises(UntrustedFileError, match=r"asks for posix\.mkdir"):
            load_model(nn.Linear(3, 4), folder)
        assert not (folder / "pwned").exists()

    def test_ours_as_theirs(self, tmp_path: Path) -> None:
        model = nn.Linear(3, 4)
        save(tmp_path / "c", Contents(models=[model]))
        convert(tmp_path / "c", tmp_path / "d", "dcp")
        other = nn.Linear(3, 4)
        assert load_model(other, tmp_path / "d", key_map={"models/0/": ""}).exact
        assert same(model, other)


class TestCommandLine:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setitem(cli.VERBS, "checkpoint", ("piledriver.cli.checkpoint", "checkpoints"))
        run = make_run(0)
        train(run, 1)
        return save(tmp_path / "run/checkpoint_4", run.contents, step=40, layout={"data": 1})

    def test_inspect(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["checkpoint", "inspect", str(folder.parent), "--verify", "--json", "--tensors"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["step"] == 40
        assert found["checksums"] == "verified"
        assert found["contents"]["models/0"].startswith("8 tensors")
        assert found["tensors"]["models/0/1.weight"] == {"dtype": "float32", "shape": [3, 5], "pieces": 1}
        assert cli.main(["checkpoint", "inspect", str(folder), "--tensors"]) == 0
        assert "models/0/1.weight  float32 [3, 5]" in capsys.readouterr().out

    def test_a_run_means_its_last_checkpoint(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        root = folder.parent.parent / "whole"
        shutil.copytree(folder.parent, root / "checkpoints")
        assert cli.main(["checkpoint", "inspect", str(root), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step"] == 40

    def test_inspect_damage(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (file,) = folder.rglob("rank-00000.safetensors")
        file.write_bytes(file.read_bytes()[:-1] + b"!")
        assert cli.main(["checkpoint", "inspect", str(folder), "--verify"]) == 1
        assert "checksum differs" in capsys.readouterr().err
        assert cli.main(["checkpoint", "inspect", str(folder.parent / "nothing")]) == 1

    @pytest.mark.parametrize("verb", ["inspect", "merge", "convert"])
    @pytest.mark.parametrize("named", ["checkpoint", "run"])
    def test_a_truncated_checkpoint_is_named_with_what_it_lacks(
        self, verb: str, named: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = str(folder if named == "checkpoint" else folder.parent)
        out = [] if verb == "inspect" else ["-o", str(tmp_path / "out")]
        (file,) = folder.rglob("rank-00000.safetensors")
        file.write_bytes(file.read_bytes()[:-7])
        assert cli.main(["checkpoint", verb, path, *out]) == 1
        assert "rank-00000.safetensors has" in capsys.readouterr().err
        (folder / "header.json").unlink()
        assert cli.main(["checkpoint", verb, path, *out]) == 1
        assert "has no header.json: its save was interrupted" in capsys.readouterr().err

    def test_merge_and_convert(self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["checkpoint", "merge", str(folder), "-o", str(tmp_path / "m"), "--max-shard-size", "100"]) == 0
        assert len(capsys.readouterr().out.splitlines()) > 1
        assert cli.main(["checkpoint", "convert", str(folder), "-o", str(tmp_path / "t.pt"), "--to", "torch"]) == 0
        found = torch.load(tmp_path / "t.pt", weights_only=False)
        assert found["step"] == 40
        assert found["models"][0]["1.weight"].shape == (3, 5)
        assert cli.main(["checkpoint", "convert", str(folder), "-o", str(tmp_path / "x"), "--to", "onnx"]) == 2
        assert cli.main(["checkpoint", "merge", str(folder), "-o", str(tmp_path / "y"), "--max-shard-size", "big"]) == 2
        assert cli.main(["checkpoint", "merge", str(folder), "-o", str(tmp_path / "y"), "--dtype", "nope"]) == 2
        assert "bfloat16" in capsys.readouterr().err

    def test_a_runs_folder_stands_for_its_latest(self, folder: Path, tmp_path: Path) -> None:
        assert cli.main(["checkpoint", "merge", str(folder.parent), "-o", str(tmp_path / "m")]) == 0
        assert cli.main(["checkpoint", "convert", str(folder.parent), "-o", str(tmp_path / "t"), "--to", "torch"]) == 0

    @pytest.mark.parametrize("verb", ["inspect", "merge", "convert"])
    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"text"])
    def test_what_are_no_weights(
        self, folder: Path, tmp_path: Path, verb: str, content: bytes, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "no.pt").write_bytes(content)
        out = ["-o", str(tmp_path / "o")] if verb != "inspect" else []
        assert cli.main(["checkpoint", verb, str(tmp_path / "no.pt"), *out]) == 1
        assert "no.pt" in capsys.readouterr().err
        assert not (tmp_path / "o").exists()


def test_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'safetensors'"):
        convert(tmp_path, tmp_path / "x", "safetensor")


@pytest.mark.parametrize("to", ["piledriver", "safetensors", "dcp", "torch"])
def test_what_convert_writes_is_read_back(tmp_path: Path, to: str) -> None:
    model = tied(1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    save(tmp_path / "saved", Contents(models=[model], optimizers=[optimizer]), step=3)
    out = convert(tmp_path / "saved", tmp_path / "out", to=to)
    again = tied(2)
    load_model(again, out)
    assert same(model, again)
    if to == "torch":
        held = torch.load(out, weights_only=True)
        assert held["step"] == 3
        assert torch.equal(held["models"][0]["1.weight"], model[1].weight)
        torch.save({"epoch": 1, "state_dict": model.state_dict()}, tmp_path / "loop.pt")
        load_model(tied(3), tmp_path / "loop.pt")


def test_flipped_weights_are_not_merged(tmp_path: Path) -> None:
    save(tmp_path / "saved", Contents(models=[tied(1)]))
    file = next((tmp_path / "saved").glob("data-*/rank-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for read in (
        lambda: merge(tmp_path / "saved", tmp_path / "out"),
        lambda: convert(tmp_path / "saved", tmp_path / "out", to="torch"),
        lambda: load_model(tied(2), tmp_path / "saved"),
    ):
        with pytest.raises(IncompleteCheckpointError, match="checksum differs"):
            read()


def test_parts_of_a_checkpoint_are_named(tmp_path: Path) -> None:
    save(tmp_path / "saved", Contents(models=[tied(1)]))
    (tmp_path / "saved" / "header.json").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"no header.json: its save was interrupted"):
        load_model(tied(2), tmp_path / "saved")
    save_model(tied(1), tmp_path / "shards", max_shard_size=150)
    (tmp_path / "shards" / "model.safetensors.index.json").unlink()
    with pytest.raises(IncompleteCheckpointError, match="no index of shards"):
        load_model(tied(2), tmp_path / "shards")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "__0_0.distcp").touch()
    with pytest.raises(IncompleteCheckpointError, match=r"no \.metadata"):
        load_model(tied(2), tmp_path / "dcp")
