"""On several processes each rank keeps its shards or rows in its tier; checkpoints are those of a run without tiers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from piledriver.checkpoint import Contents, load, save
from piledriver.engine import Layout, Offload
from piledriver.engine.apply import apply, apply_optimizer
from piledriver.engine.mesh import make_mesh
from piledriver.engine.offload import undo_offload
from piledriver.engine.optimizer.global_norm import clip_sharded_grad_norm
from piledriver.engine.optimizer.loss_scale import LossScale, LossScaler
from piledriver.engine.optimizer.parameter_map import ParameterMap
from piledriver.engine.state import no_sync
from piledriver.models import ModelConfig, Transformer
from piledriver.optim import CompactAdamW
from tests.checkpoint.processes import run as on_ranks


def make(layout: Layout) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)))
    optimizer, mesh, parameters = (
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        make_mesh(layout, "cpu"),
        ParameterMap(),
    )
    before = dict(model.named_parameters())
    model = apply(model, mesh, device=torch.device("cpu"))
    parameters.record(model, before)
    apply_optimizer(optimizer, mesh, parameters)
    return model, optimizer, mesh


def train(
    made: tuple[nn.Module, torch.optim.Optimizer, Any], steps: range, rank: int, clip: bool = True
) -> list[float]:
    model, optimizer, mesh = made
    seen = []
    for step in steps:
        for part in range(2):
            batch = torch.randn(4, 24, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
            if part == 0:
                with no_sync(model):
                    model(batch).square().mean().backward()
            else:
                loss = model(batch).square().mean()
                loss.backward()
        if clip:
            seen.append(float(clip_sharded_grad_norm(list(model.parameters()), 0.1, mesh=mesh)))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def values(made: tuple[nn.Module, torch.optim.Optimizer, Any]) -> list[Any]:
    model, optimizer, _ = made
    weights = [whole(value) for value in model.state_dict().values()]
    states = sorted(optimizer.state_dict()["state"].items())
    return weights + [whole(value) for _, state in states for _, value in sorted(state.items())]


def process(rank: int, folder: str) -> None:
    on_disk: dict[str, Any] = {"optimizer": "disk", "folder": folder, "buffer_bytes": 1 << 16}
    for zero in (1, 2, 3):
        tiers: list[Any] = ["none", "optimizer", Offload(**on_disk), Offload(**on_disk, optimizer_share=0.5)]
        tiers += [Offload(**on_disk, gradients="disk"), Offload(**on_disk, parameters="disk")]
        tiers += [Offload(**on_disk, parameters="host"), Offload(**{**on_disk, "optimizer": "host"}, parameters="disk")]
        runs = [make(Layout(zero=zero, offload=one)) for one in tiers]  # type: ignore[arg-type]
        losses = [train(one, range(2), rank) for one in runs]
        assert all(one == losses[0] for one in losses), (zero, losses)
        expected = values(runs[0])
        for made, one in zip(runs, tiers, strict=True):
            for ours, theirs in zip(values(made), expected, strict=True):
                assert torch.equal(ours, theirs), (zero, one)

        # Saved with tiers, resumed without, and the other way round.
        for source, target in ((5, "none"), (0, tiers[5])):
            path = Path(folder).parent / f"checkpoints-{zero}-{source}"
            save(path, Contents(models=[runs[source][0]], optimizers=[runs[source][1]], rng=False))
            resumed = make(Layout(zero=zero, offload=target))  # type: ignore[arg-type]
            train(resumed, range(1), rank)
            load(path, Contents(models=[resumed[0]], optimizers=[resumed[1]], rng=False))
            assert train(resumed, range(2, 3), rank) == train(runs[source], range(2, 3), rank)
            for ours, theirs in zip(values(resumed), values(runs[source]), strict=True):
                assert torch.equal(ours, theirs), (zero, target)
        for target in (tiers[5], tiers[6]):
            undo_offload(runs[tiers.index(target)][0])
            assert runs[tiers.index(target)][0](torch.ones(1, 24)).isfinite().all()
    parameters_on_disk(rank, on_disk)
    stages_on_disk(on_disk)
    stepped, plain = (make(Layout(zero=3, offload=one)) for one in (Offload(**on_disk, gradients="step"), "optimizer"))
    assert train(stepped, range(2), rank, clip=False) == train(plain, range(2), rank, clip=False)


def transformer(layout: Layout, optimizer: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model that was made without memory, of which not all shards are even, and its optimizer."""
    with torch.device("meta"):
        model: nn.Module = Transformer(ModelConfig(vocab_size=33, dim=16, layers=2, heads=2, tied=True))
    made, mesh, parameters, before = (
        optimizer(model.parameters()),
        make_mesh(layout, "cpu"),
        ParameterMap(),
        dict(model.named_parameters()),
    )
    model = apply(model, mesh, device=torch.device("cpu"))
    parameters.record(model, before)
    apply_optimizer(made, mesh, parameters)
    return model, made


def losses_of(made: tuple[nn.Module, torch.optim.Optimizer], rank: int, *, scaled: bool) -> list[float]:
    model, optimizer = made
    scaler, found = LossScaler(LossScale(initial=8.0)), []
    for step in range(3):
        tokens = torch.randint(33, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))
        sums = model(tokens[:, :-1], targets=tokens[:, 1:])
        loss = sums.total / sums.tokens
        found.append(loss.item())
        if scaled:
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    assert scaler.skipped == int(scaled)
    return found


def parameters_on_disk(rank: int, on_disk: dict[str, Any]) -> None:
    """Blocks that each rank reads from its files train as those on the device do, with any optimizer and precision."""
    adamw = partial(torch.optim.AdamW, lr=1e-2, fused=True)
    compact = partial(CompactAdamW, lr=1e-2, states="int8")
    cases: list[tuple[int, str, Any, dict[str, Any]]] = [(zero, "bf16", compact, {}) for zero in (1, 2, 3)]
    cases += [(3, "fp16", adamw, {}), (3, "bf16", adamw, {"gradients": "step"})]
    cases += [(2, "bf16", adamw, {"parameters_share": 0.5, "optimizer_share": 0.5})]
    for zero, precision, optimizer, options in cases:
        made = [
            transformer(Layout(zero=zero, precision=precision, offload=one, compile=False), optimizer)  # type: ignore[arg-type]
            for one in ("optimizer", Offload(**on_disk, parameters="disk", **options))
        ]
        theirs, ours = (losses_of(one, rank, scaled=precision == "fp16") for one in made)
        assert ours == theirs, (zero, precision, options)
        for mine, other in zip(values((*made[1], None)), values((*made[0], None)), strict=True):
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(other)), (zero, precision, options)


def stages_on_disk(on_disk: dict[str, Any]) -> None:
    """Masters and states of a pipeline's stages, tied weights among them, train alike wherever they wait."""
    adamw = partial(torch.optim.AdamW, lr=1e-2, fused=True)
    for precision, tiers in (
        ("fp32", ["none", "optimizer", Offload(**on_disk, optimizer_share=0.5)]),
        ("bf16", ["optimizer", Offload(**on_disk, gradients="disk")]),
    ):
        made = [
            transformer(Layout(pp=2, microbatches=2, precision=precision, offload=one, compile=False), adamw)  # type: ignore[arg-type]
            for one in tiers
        ]
        losses = [losses_of(one, 0, scaled=False) for one in made]
        assert all(one == losses[0] for one in losses), (precision, losses)
        for one in made[1:]:
            for ours, theirs in zip(values((*one, None)), values((*made[0], None)), strict=True):
                assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)), precision


@pytest.mark.slow
def test_ranks_keep_their_share_in_a_tier(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    on_ranks(2, process, str(folder))
    assert list(folder.iterdir()) == []
