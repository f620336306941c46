"""Make the files of version 0.1 in `tests/fixtures/0.1`, and the models that `test_old_files.py` opens them with.

Run once with the sources of 0.1, as `tests/fixtures/0.1/README.md` says; the files stay as they are from then on.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from piledriver import functional
from piledriver.checkpoint import Contents, save

FIXTURES = Path(__file__).parents[1] / "fixtures" / "0.1"
STEPS, STEPS_TO_THE_CHECKPOINT = 8, 4
PROBE = "The beans were planted in April, before the ferry left the harbour."
TRAIN = """\
model: {vocab_size: 300, dim: 8, layers: 1, heads: 2, max_positions: 32, tied: true}
data: {tokens: tokens, seq_len: 32}
batch_tokens: 128
budget_tokens: 1024
checkpoint_steps: 4
keep_checkpoints: 10
trackers: []
plots: false
deterministic: true
seed: 3
"""
RECIPE = """\
name: old
seed: 5
splits: {validation: 0.2, test: 0.2}
sources:
  - {source: text, name: Garden, paths: [raw/garden]}
  - {source: markdown, name: Harbour, paths: [raw/harbour]}
stages:
  - {use: length, settings: {min_characters: 60}}
  - {use: exact}
  - {use: near}
"""
_SENTENCES = [
    "The beans were planted in the second week of April, when the soil no longer froze at night.",
    "Rain came late that year and the barrels under the gutter stood empty until the end of May.",
    "A blackbird took most of the cherries before anyone had thought of a net.",
    "Tomatoes want sun from above and water from below, and they forgive neither neglect nor haste.",
    "We counted forty snails on the lettuce and carried them to the meadow behind the hedge.",
    "The old pear tree bears fruit only every other summer, small and hard but very sweet.",
    "Compost is patience with a fork; turn it twice and it will do the rest alone.",
    "In October the dahlias go into the cellar, each with a label tied around its stem.",
    "The ferry leaves at seven and again at noon, except on days when the wind stands in the mouth of the harbour.",
    "Nets hang over the wall to dry, and beneath them the cats wait for what the gulls have dropped.",
    "Her father built boats of oak and larch, and he measured every plank by eye before he measured it by rule.",
    "The lighthouse has not been manned since the cable was laid, yet the lamp is polished every week.",
    "At low tide one can walk to the island, provided one does not stop to look for mussels on the way.",
    "A storm moved the sandbank by the length of three ships, so the pilots drew their charts again.",
    "The harbour master keeps a book of arrivals that begins in the year of the great flood.",
    "Fog makes the bell sound nearer than it is, and strangers steer by it at their peril.",
]


class Model(nn.Module):
    """An odd-sized network with a tied weight and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.hidden = nn.Linear(5, 5)
        self.out = nn.Linear(5, 7, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(self.norm(self.embedding(words)))))


class Tally:
    """A custom object of a checkpoint, with values that JSON alone cannot hold."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {}

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def make_run(
    seed: int, *, sharded: bool = False, tied: bool = False
) -> tuple[Model, torch.optim.Optimizer, Any, Tally]:
    """A model and what trains it, with a tied weight or sharded over all ranks."""
    model = Model(seed)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.hidden, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if tied:
        model.out.weight = model.embedding.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50), Tally()


def contents(run: tuple[Model, torch.optim.Optimizer, Any, Tally], rank: Tally) -> Contents:
    """Everything of a run; `rank` is a state of each rank's own."""
    model, optimizer, scheduler, tally = run
    return Contents(
        models=[model], optimizers=[optimizer], schedulers=[scheduler], custom=[tally], per_rank={"rank": rank}
    )


def steps(run: tuple[Model, torch.optim.Optimizer, Any, Tally], first: int, last: int) -> list[float]:
    """Train from step `first` to `last` on batches that depend on the step alone; return the losses."""
    model, optimizer, scheduler, _ = run
    losses = []
    for step in range(first, last):
        words = torch.randint(0, 7, (16,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(words), words.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors, gathered."""
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for key, value in model.state_dict().items()
    }


def make_checkpoint(rank: int, folder: Path, ranks: int) -> None:
    """Save after three steps; then take three more and write down what they gave, for the comparison."""
    run = make_run(0, sharded=ranks > 1, tied=ranks == 1)
    steps(run, 0, 3)
    run[3].state = {"seen": 3, "shape": (1, 2), 7: {"x"}, "average": torch.arange(3.0), "name": b"\x00tally"}
    own = Tally()
    own.state = {"rank": rank}
    save(folder, contents(run, own), step=3, layout={"data": ranks}, extra={"epoch": 1})
    at_save = whole(run[0])
    losses = steps(run, 3, 6)
    if rank == 0:
        expected = {"losses": losses, "hidden": at_save["hidden.weight"].tolist()}
        folder.with_suffix(".json").write_text(json.dumps(expected))


def _two_ranks(rank: int, folder: Path, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    make_checkpoint(rank, folder, 2)
    dist.barrier()
    dist.destroy_process_group()


def _verb(*arguments: str) -> str:
    command = [sys.executable, "-m", "piledriver.cli.main", *arguments]
    return subprocess.run(command, check=True, cwd=FIXTURES, stdout=subprocess.PIPE, text=True).stdout


def _write_scores() -> None:
    from piledriver.corpus.filters.classifier import load_classifier

    printed = _verb("evaluate", "bpb", "--model", "model", "--corpus", "corpus/validation", "--json")
    scores = {
        "bits_per_byte": json.loads(printed)["bits_per_byte"]["all"]["bits_per_byte"],
        "quality": load_classifier(str(FIXTURES / "quality.model")).score(PROBE),
    }
    (FIXTURES / "scores.json").write_text(json.dumps(scores))


def _write_raw() -> None:
    """Two sources of eight sentences each; an equal, a nearly equal and a short document among them."""
    for source, suffix, sentences in (("garden", "txt", _SENTENCES[:8]), ("harbour", "md", _SENTENCES[8:])):
        folder = FIXTURES / "raw" / source
        folder.mkdir(parents=True)
        for number in range(8):
            chosen = [sentences[(number + i * (number % 3 + 1)) % 8] for i in range(4)]
            (folder / f"{number}.{suffix}").write_text(" ".join(chosen) + "\n")
    (FIXTURES / "raw/garden/equal.txt").write_text((FIXTURES / "raw/garden/0.txt").read_text())
    long = " ".join(_SENTENCES[8:]) + " " + " ".join(reversed(_SENTENCES[8:]))
    (FIXTURES / "raw/harbour/long.md").write_text(long + "\n")
    (FIXTURES / "raw/harbour/near.md").write_text(long + " So ends the book.\n")
    (FIXTURES / "raw/harbour/short.md").write_text("Closed.\n")
    (FIXTURES / "recipe.yaml").write_text(RECIPE)
    (FIXTURES / "train.yaml").write_text(TRAIN)


def _interrupt(run: Path) -> None:
    """Leave what a run killed after its first checkpoint leaves; what the whole run gave is kept beside it."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    losses = {line["step"]: line["loss"] for line in map(json.loads, lines)}
    (FIXTURES / "losses.json").write_text(json.dumps(losses))
    (run / "metrics.jsonl").write_text("".join(lines[:STEPS_TO_THE_CHECKPOINT]))
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS}")
    (run / "model").rename(FIXTURES / "model")


def state() -> dict[str, Any]:
    """A tree of tensors of several dtypes and shapes, as `functional.to_bytes` packs it."""
    return {
        "params": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)},
        "step": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "note": "state",
    }


def main() -> None:
    """Make every fixture anew."""
    torch.set_num_threads(1)
    _write_raw()
    _verb("corpus", "build", "recipe.yaml", "-o", "corpus", "--workers", "1")
    _verb("tokenizer", "train", "corpus/train", "-o", "tokenizer.json", "--vocab-size", "300")
    _verb("tokenize", "corpus/train", "--tokenizer", "tokenizer.json", "-o", "tokens", "--workers", "1")
    kinds = ("--good", "corpus/train", "--bad", "corpus/test")
    _verb("corpus", "classifier", *kinds, "-o", "quality.model", "--set", "bits=8")
    shutil.rmtree(FIXTURES / "corpus" / ".work")
    (FIXTURES / "corpus" / ".lock").unlink()
    (FIXTURES / "state.msgpack").write_bytes(functional.to_bytes(state()))
    _verb("train", "train.yaml", "out=run")
    _interrupt(FIXTURES / "run")
    _write_scores()
    make_checkpoint(0, FIXTURES / "checkpoint_of_1", 1)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        torch.multiprocessing.spawn(_two_ranks, (FIXTURES / "checkpoint_of_2", store), nprocs=2)


if __name__ == "__main__":
    main()
