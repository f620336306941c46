"""Law 1: every layout trains like one process. Laws 3 and 4: and goes on from any other's checkpoint.

The rows are in `layouts.py`. All rows of one number of processes are one test and share one start of processes, which
costs more than what they do; if one fails, the others run in new processes. `LAYOUTS="zero3 zero3-tp"` in the
environment runs only these.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import queue
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from piledriver.accelerator import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from piledriver.models import LatentAttentionConfig, ModelConfig, MoEConfig, Transformer
from piledriver.optim import CompactAdamW, Lion, Muon, parameter_groups
from piledriver.runtime.world import group_world
from tests.checkpoint.processes import run as on_ranks
from tests.laws.layouts import ROWS, Row
from tests.patience import HANG_S

STEPS, SAVED = 3, 2
BATCH, TIME, VOCAB = 8, 16, 64
PATIENCE = timedelta(seconds=HANG_S)
EXACT = 1e-3


class PlainStack(nn.Module):
    """What a user writes, with sizes that no number of processes divides, and one frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCAB, 30)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(30), nn.Linear(30, 53), nn.GELU(), nn.Linear(53, 30)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(30), requires_grad=False)
        self.out = nn.Linear(30, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x * self.scale)


THEIRS = {"llama": "llama-tied-bias", "mixtral": "mixtral"}
"""Models of transformers: what `tests.engine.fused.catalogue` calls them."""


def make_model(kind: str) -> nn.Module:
    if kind == "plain":
        return PlainStack()
    if kind in THEIRS:
        from tests.engine.fused.catalogue import build

        return build(THEIRS[kind])
    experts = {"experts": 4, "experts_per_token": 2, "balance_coefficient": 0.0}
    options: dict[str, Any] = {
        "moe": {"moe": MoEConfig(**experts)},
        "latent": {
            "kv_heads": 4,
            "latent": LatentAttentionConfig(kv_rank=16, rope_dim=4, value_dim=8, q_rank=16),
            "moe": MoEConfig(
                **experts, expert_dim=64, shared_dim=64, dense_layers=(0,), scores="sigmoid", correction_bias=True
            ),
        },
        "sinks": {
            "sliding_window": 5,
            "attention_sinks": True,
            "mlp_bias": True,
            "gate_limit": 7.0,
            "activation": "quick_gelu",
            "moe": MoEConfig(**experts, router_bias=True),
        },
        "shared-norm": {
            "positions": "alibi",
            "norm": "layer",
            "norm_bias": True,
            "embedding_norm": True,
            "parallel_residual": True,
            "shared_norm": True,
            "head_bias": True,
        },
    }
    config = ModelConfig(
        vocab_size=VOCAB,
        dim=32,
        # Two blocks are the fewest that can be cut, gathered ahead, or recomputed in part.
        layers=4 if kind == "deep" else 2,
        heads=4,
        mlp_dim=64,
        max_positions=64,
        tied=kind in ("tied", "deep"),
        **{"kv_heads": 2, **options.get(kind, {})},
    )
    return Transformer(config, seed=1)


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "muon":
        return Muon(parameter_groups(model, lr=0.01), dtype=torch.float32)
    if kind == "lion":
        return Lion(model.parameters(), lr=3e-4)
    if kind == "compact":
        return CompactAdamW(model.parameters(), lr=3e-3)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=3e-3, fused=True)


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCAB, (STEPS * BATCH, TIME + 1), generator=generator)
    # Something to learn: every second token repeats the one before.
    tokens[:, 1::2] = tokens[:, 0:-1:2]
    # Shuffled, so that a loader that went on elsewhere would show.
    order = torch.Generator().manual_seed(5)
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return DataLoader(data, batch_size=BATCH, shuffle=True, generator=order)


def mean_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if isinstance(model, PlainStack):
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    if not isinstance(model, Transformer):
        return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]
    sums = model(tokens, targets)
    return sums.total / sums.tokens


def train(row: Row, accelerator: Accelerator, ready: tuple[Any, ...], save: Path | None) -> list[float]:
    model, optimizer, loader = ready
    losses = []
    for step, (tokens, targets) in enumerate(loader):
        total = 0.0
        # The same batch in parts, so that losses can be compared with those of rows that do not accumulate.
        for x, y in zip(tokens.chunk(row.accumulate), targets.chunk(row.accumulate), strict=True):
            with accelerator.accumulate(model):
                loss = mean_loss(model, x, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / row.accumulate
        losses.append(accelerator.reduce(torch.tensor(total), "mean").item())
        if save is not None and step + 1 == SAVED:
            accelerator.save_state(save)
    return losses


def prepared(row: Row, accelerator: Accelerator) -> tuple[Any, ...]:
    model = make_model(row.model)
    return tuple(accelerator.prepare(model, make_optimizer(row.optimizer, model), batches()))


def leave(accelerator: Accelerator) -> None:
    """Give back what one row holds, but stay connected for the next one."""
    accelerator._saver.close()
    accelerator.free_memory()


def run_row(row: Row, folder: Path, before: str | None = None, alone: bool = False) -> dict[str, Any]:
    """Losses and weights of one row, and of going on from the checkpoint that `before` saved."""

    def accelerator() -> Accelerator:
        return Accelerator(
            world=group_world(),
            layout=None if alone else row.layout,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=row.accumulate, sync_with_dataloader=False
            ),
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            **({} if alone else row.options),
        )

    first = accelerator()
    ready = prepared(row, first)
    result: dict[str, Any] = {"losses": train(row, first, ready, folder / row.name)}
    result["weights"] = {key: value.clone() for key, value in first.get_state_dict(ready[0]).items()}
    if before is not None:
        again = accelerator()
        went_on = prepared(row, again)
        again.load_state(folder / before)
        result["losses_after"] = train(row, again, went_on, None)
        result["weights_after"] = {key: value.clone() for key, value in again.get_state_dict(went_on[0]).items()}
        leave(again)
    leave(first)
    return result


def predecessors(rows: list[Row]) -> dict[str, str | None]:
    """Whose checkpoint each row goes on from: the row before of the same kind, the first one from one process's.

    So what any row saved is loaded by another layout. What is exact goes on from what is exact; a row of low precision
    from either.
    """
    found: dict[str, str | None] = {}
    last: dict[tuple[str, str, bool], str] = {}
    for row in rows:
        exact = row.loss < EXACT
        alone = one_process(row).name
        found[row.name] = last.get((row.model, row.optimizer, exact), alone) if row.moves else None
        if row.moves:
            for kind in {exact, False}:
                last[row.model, row.optimizer, kind] = row.name
    return found


def one_process(row: Row) -> Row:
    """What a row is compared with."""
    return Row(name=f"one-{row.model}-{row.optimizer}", layout=ROWS[0].layout, model=row.model, optimizer=row.optimizer)


def _work(rank: int, names: dict[str, str | None], folder: str) -> None:
    """Each process runs the rows one after the other and notes what it found; the first failure ends it."""
    rows = {row.name: row for row in ROWS}
    for name, before in names.items():
        (Path(folder) / f"{name}.{rank}.began").touch()
        try:
            found = run_row(rows[name], Path(folder), before)
        except BaseException:
            (Path(folder) / f"{name}.{rank}.error").write_text(traceback.format_exc())
            raise
        if rank == 0:
            (Path(folder) / f"{name}.result").write_bytes(pickle.dumps(found))
        dist.barrier()


def run_rows(rows: list[Row], processes: int, folder: Path) -> None:
    """Run all rows; what each found, or said when it failed, is left in the folder."""
    by_name = {row.name: row for row in rows}
    left = predecessors(rows)
    while left:
        with suppress(AssertionError, queue.Empty):
            on_ranks(processes, _work, left, str(folder), patience=PATIENCE)
        began = [name for name in left if any(folder.glob(f"{name}.*.began"))]
        # Nobody goes on from a row that failed.
        failed = {name for name in began if not (folder / f"{name}.result").exists()}
        left = {
            name: one_process(by_name[name]).name if before in failed else before
            for name, before in left.items()
            if name not in began
        }
        if not began:
            return


def complaint(row: Row, alone: dict[str, Any], folder: Path) -> str | None:
    """What is wrong with a row, if anything is."""
    result = folder / f"{row.name}.result"
    if not result.exists():
        said = dict.fromkeys(path.read_text() for path in sorted(folder.glob(f"{row.name}.*.error")))
        return "\n".join(said) or "a process ended without a word"
    found = pickle.loads(result.read_bytes())
    try:
        assert found["losses"] == pytest.approx(alone["losses"], rel=row.loss)
        assert found["weights"].keys() == alone["weights"].keys()
        _near(found["weights"], alone["weights"], row.weight)
        if row.moves:
            assert found["losses_after"] == pytest.approx(alone["losses"][SAVED:], rel=row.loss)
            _near(found["weights_after"], alone["weights"], row.weight)
    except AssertionError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all rows leave their checkpoints, so that one process runs each reference once."""
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Any]]:
    """What one process found, by name; filled as rows ask for it."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("processes", sorted({row.processes for row in ROWS}))
def test_layouts_train_like_one_process(processes: int, folder: Path, references: dict[str, dict[str, Any]]) -> None:
    known = importlib.util.find_spec("transformers") is not None
    rows = [
        row
        for row in ROWS
        if row.processes == processes
        and row.name in os.environ.get("LAYOUTS", row.name).split()
        and (known or row.model not in THEIRS)
    ]
    for one in map(one_process, rows):
        if one.name not in references:
            references[one.name] = run_row(one, folder, alone=True)
    run_rows(rows, processes, folder)
    wrong = {row.name: complaint(row, references[one_process(row).name], folder) for row in rows}
    said = [f"{name}: {what}" for name, what in wrong.items() if what is not None]
    assert not said, "\n\n".join(said)


def _near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    for key, value in wanted.items():
        off = (found[key].float() - value.float()).abs().max().item()
        assert off <= tolerance, f"{key} is off by {off}"
