"""Bytes of offloaded states and streamed weights, tier by tier, are those that gloo ranks hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from piledriver.engine.apply import apply, apply_optimizer
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.offload import OFFLOADED
from piledriver.engine.optimizer.parameter_map import ParameterMap
from piledriver.engine.tiers import Offload
from piledriver.models import Transformer
from piledriver.models.config import ModelConfig
from piledriver.optim import OptimizerConfig, build_optimizer
from piledriver.optim.shards import local
from piledriver.plan.blocks.parameters import stages_of_layout
from piledriver.plan.memory.states import stage_total
from tests.checkpoint.processes import run as on_ranks

RANKS, LENGTH = 2, 16
MODEL = ModelConfig(vocab_size=300, dim=32, layers=3, heads=4, kv_heads=2, mlp_dim=64, max_positions=LENGTH, tied=False)
ON_DISK = Offload(optimizer="disk", parameters="disk", gradients="disk", folder="-")
TIERS: dict[str, Any] = {
    "optimizer": "optimizer",
    "parameters": "parameters",
    "disk": ON_DISK,
    "states-on-disk": replace(ON_DISK, parameters="host", gradients="host"),
    "step": replace(ON_DISK, parameters="host", gradients="step"),
}
CASES = {
    f"zero{zero}-{name}-{precision}": Layout(zero=zero, offload=tiers, precision=precision)  # type: ignore[arg-type]
    for zero in (1, 2, 3)
    for name, tiers in TIERS.items()
    for precision in ("fp32", "bf16")
    if zero == 3 or name != "step"  # steps in the backward need shards
}


def _there(layout: Layout, folder: str) -> Layout:
    """The layout with its files in a folder."""
    if isinstance(layout.offload, str):
        return layout
    return replace(layout, offload=replace(layout.offload, folder=folder))


def _held(layout: Layout) -> dict[str, float]:
    """Train two steps; the bytes of this rank by tier."""
    mesh = make_mesh(layout, "cpu")
    model = Transformer(MODEL, seed=1)
    optimizer = build_optimizer(model, OptimizerConfig(kind="adamw", lr=1e-3))
    before = dict(model.named_parameters())
    apply(model, mesh, device=torch.device("cpu"))
    now, replaced = dict(model.named_parameters()), ParameterMap()
    replaced.replaced.update({before[name]: new for name, new in now.items() if before[name] is not new})
    apply_optimizer(optimizer, mesh, replaced)
    tokens = torch.randint(MODEL.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(mesh.data_rank))
    for last in (False, True):
        sums = model(tokens, tokens)
        (sums.total / sums.tokens).backward()
        if not last:
            optimizer.step()
            optimizer.zero_grad()
    found: Counter[str] = Counter()
    made = model.__dict__.get(OFFLOADED)
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    if made is None:
        for tensor in (*model.parameters(), *(one.grad for one in model.parameters()), *states):
            found["host"] += local(tensor.detach()).nbytes
        return dict(found)
    made.gradients.settle()

    def add(tensor: torch.Tensor) -> None:
        part = local(tensor.detach())
        in_file = made.store is not None and made.store.find(part) is not None
        found["disk" if in_file else "host"] += part.nbytes

    for master in made.masters.values():
        add(master.part)
        if layout.tiers.gradients != "step":
            add(master.tensor.grad)
    for tensor in states:
        if tensor.dim():
            add(tensor)
    streamed = {} if made.stream is None else made.stream.weights
    for one in streamed.values():
        if not one.is_master:
            add(one.source)
    found["weights"] = sum(local(one.detach()).nbytes for one in model.parameters() if one not in streamed)
    return dict(found)


def _work(rank: int, folder: str) -> dict[str, dict[str, float]]:
    return {name: _held(_there(layout, folder)) for name, layout in CASES.items()}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    folder: Path = tmp_path_factory.mktemp("tiers")
    found: list[dict[str, dict[str, float]]] = on_ranks(RANKS, _work, str(folder))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bytes_by_tier(name: str, measured: list[dict[str, dict[str, float]]]) -> None:
    layout = CASES[name].on(RANKS)
    said = stage_total(MODEL, stages_of_layout(MODEL, layout)[0], layout, "adamw")
    for tier in ("weights", "host", "disk"):
        largest = max(answer[name].get(tier, 0.0) for answer in measured)
        assert getattr(said, tier) == pytest.approx(largest, rel=0.01, abs=200), tier
