"""Pipelines train like one process: every schedule, alone and with zero, replicas and tied weights, on 2 and 4.

One launch per number of processes holds many cases: starting processes costs more than what they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from piledriver.engine import Layout
from piledriver.engine.apply import apply
from piledriver.engine.mesh import Mesh, make_mesh
from piledriver.engine.optimizer.global_norm import total_norm
from piledriver.engine.pipeline_parallel.runner import Pipeline
from piledriver.engine.shards.full_state_dict import full_state_dict
from piledriver.engine.shards.owned_rows import optimizer_tensors
from piledriver.engine.state import state_of
from piledriver.models import ModelConfig, Transformer
from piledriver.models.config import MoEConfig
from piledriver.models.model_size import parameter_count
from tests.checkpoint.processes import run as on_ranks

STEPS, TIME, CPU = 2, 8, torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One layout, model and batch."""

    layout: Layout
    tied: bool = False
    moe: bool = False
    rows: int = 16
    meta: bool = False
    accumulate: int = 1

    def config(self) -> ModelConfig:
        moe = MoEConfig(experts=4, experts_per_token=2, balance_coefficient=0.1) if self.moe else None
        return ModelConfig(
            vocab_size=32, dim=16, layers=4, heads=2, mlp_dim=64, tied=self.tied, moe=moe, max_positions=16
        )


def _batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(STEPS * case.accumulate):
        tokens = torch.randint(0, 32, (case.rows, TIME + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        # Rows differ in what counts, and some do not count at all.
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
        targets[0] = -100
        made.append((tokens[:, :-1].contiguous(), targets))
    return made


def _mine(batch: tuple[Tensor, Tensor], index: int, of: int) -> tuple[Tensor, Tensor]:
    rows = batch[0].shape[0] // of
    return batch[0][index * rows : (index + 1) * rows], batch[1][index * rows : (index + 1) * rows]


def _reference(case: Case, data_size: int, microbatches: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """One process, with the micro-batches of all of them (the balance of experts is one of a micro-batch)."""
    model = Transformer(case.config(), seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    batches = _batches(case)
    for step in range(STEPS):
        window = batches[step * case.accumulate : (step + 1) * case.accumulate]
        tokens = sum(int((targets != -100).sum()) for _, targets in window)
        total = torch.zeros(())
        for batch in window:
            for index in range(data_size):
                x, y = _mine(batch, index, data_size)
                for part_x, part_y in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
                    if len(part_x):
                        total = total + model(part_x, part_y).total
        loss = total / tokens
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def _lay_out(case: Case, mesh: Mesh) -> tuple[nn.Module, Pipeline]:
    with torch.device("meta" if case.meta else "cpu"):
        model: nn.Module = Transformer(case.config(), seed=3)
    model = apply(model, mesh, device=CPU, weights=3)
    known = state_of(model)
    assert known is not None
    return model, known.pipeline


def _each_parameter_has_one_owner(case: Case, model: nn.Module, mesh: Mesh) -> None:
    """So no rank has another's, and norms, optimizers and checkpoints meet a tied weight once."""
    held = torch.tensor(sum(parameter.numel() for parameter in model.parameters()))
    dist.all_reduce(held, group=mesh.pp.get_group())
    assert int(held) == parameter_count(case.config())


def _train(case: Case) -> None:
    mesh = make_mesh(case.layout, "cpu")
    model, pipeline = _lay_out(case, mesh)
    _each_parameter_has_one_owner(case, model, mesh)
    size = mesh.layout.data_size
    wanted: list[Any] = [_reference(case, size, pipeline.microbatches) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(wanted)
    want_losses, want_norms, want = wanted[0]
    optimizer = torch.optim.AdamW(optimizer_tensors(model.parameters()), lr=0.01)
    batches = _batches(case)
    if case.accumulate == 1:
        sums = pipeline.evaluate(*_mine(batches[0], mesh.data_rank, size))
        assert abs(float(sums.total / sums.tokens) - want_losses[0]) < 1e-5 * want_losses[0], (case, sums)
    for step in range(STEPS):
        window = batches[step * case.accumulate : (step + 1) * case.accumulate]
        tokens = sum(int((targets != -100).sum()) for _, targets in window)
        summed = 0.0
        for number, batch in enumerate(window):
            x, y = _mine(batch, mesh.data_rank, size)
            last = number == len(window) - 1
            sums = pipeline.step(x, y, divisor=None if case.accumulate == 1 else tokens, sync=last)
            summed += float(sums.total)
        assert abs(summed / tokens - want_losses[step]) < 1e-5 * abs(want_losses[step]), (case, step, summed / tokens)
        norm = total_norm([p for p in optimizer_tensors(model.parameters()) if p.grad is not None], 2.0, mesh)
        assert abs(float(norm) - want_norms[step]) < 1e-4 * want_norms[step], (case, step, norm, want_norms[step])
        optimizer.step()
        if case.layout.zero in (1, 2):
            from piledriver.engine.shards import owned_rows as parts

            parts.gather_rows(list(model.parameters()), mesh.dense["dp_shard"])
        for parameter in [*model.parameters(), *optimizer_tensors(model.parameters())]:
            parameter.grad = None
    got = full_state_dict(model, mesh)
    assert set(got) == set(want), (case, set(got) ^ set(want))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{case} {n}: {m}")


def _train_all(rank: int, cases: list[Case]) -> None:
    for case in cases:
        _train(case)


def _two(**sizes: Any) -> Layout:
    return Layout(pp=2, microbatches=4, **sizes)


ON_TWO = [
    Case(_two(schedule="gpipe")),
    Case(_two(schedule="gpipe"), rows=3),
    Case(_two(), rows=14, tied=True),
    Case(_two(activations="full"), meta=True),
    Case(_two(), tied=True, accumulate=2),
    Case(_two(), moe=True),
    Case(_two(schedule="interleaved-1f1b"), tied=True, meta=True),
    Case(_two(schedule="looped-bfs")),
    Case(_two(schedule="interleaved-zero-bubble"), tied=True),
    Case(_two(schedule="zbv"), tied=True),
    Case(_two(schedule="zbv", activations="full"), moe=True),
    Case(_two(schedule="dualpipev"), tied=True),
]

ON_FOUR = [
    Case(_two(), tied=True),
    Case(_two(zero=1), tied=True),
    Case(_two(zero=2), tied=True, accumulate=2),
    Case(_two(zero=3), meta=True, tied=True),
    Case(_two(zero=3, schedule="interleaved-1f1b"), tied=True, accumulate=2),
    Case(_two(zero=3, schedule="zbv"), tied=True, meta=True),
    Case(_two(tp=2)),
    Case(_two(tp=2, schedule="zbv"), tied=True),
    Case(Layout(pp=4, microbatches=4), tied=True),
    Case(Layout(pp=4, microbatches=2, schedule="gpipe")),
]


@pytest.mark.slow
def test_two_processes_train_like_one() -> None:
    """Every schedule, tied or not, with experts, recomputation, accumulation and rows that do not divide."""
    on_ranks(2, _train_all, ON_TWO)


@pytest.mark.slow
def test_four_processes_train_like_one() -> None:
    """Replicas, every stage of zero and tensor parallel inside a stage; four stages on four ranks."""
    on_ranks(4, _train_all, ON_FOUR)
