"""A few steps of a model, laid out by the steps of the engine alone, against the same model on one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from piledriver.engine import Layout
from piledriver.engine.context_parallel import apply_cp
from piledriver.engine.data_parallel import apply_zero, attach_reducer
from piledriver.engine.expert_parallel import apply_ep
from piledriver.engine.mesh import Mesh, make_mesh
from piledriver.engine.options import DDPOptions
from piledriver.engine.tensor_parallel import apply_tp
from piledriver.models import ModelConfig, Transformer, make_masks

BATCH, VOCAB = 4, 51  # no number of processes divides this vocabulary


def config(**options: Any) -> ModelConfig:
    return ModelConfig(**{"vocab_size": VOCAB, "dim": 32, "layers": 2, "heads": 4, "max_positions": 32, **options})


def lay_out(model: Transformer, layout: Layout) -> Mesh:
    mesh = make_mesh(layout, "cpu")
    for step in (apply_tp, apply_ep, apply_cp, apply_zero):
        step(model, mesh)
    model.reducer = attach_reducer(model, mesh, DDPOptions())
    return mesh


def train(model: Transformer, mesh: Mesh | None, *, time: int, documents: bool = False, steps: int = 2) -> Any:
    """Losses of each step with SGD, which unlike Adam shows gradients of a wrong scale, then the weights."""
    rank, size = (0, 1) if mesh is None else (mesh.data_rank, mesh.layout.data_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (BATCH, time + 1), generator=generator).chunk(size)[rank]
        targets = tokens[:, 1:].clone()
        targets[:, :3] = -100  # of the parts of a sequence, the first one counts less
        ids = (torch.arange(time) // 5).expand(len(tokens), time)
        masks = make_masks(model.config, time, "cpu", ids) if documents else None
        sums = model(tokens[:, :-1], targets, masks=masks)
        loss = sums.total / sums.tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    weights = {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}
    return torch.stack(losses), weights


def assert_like_one_process(shape: ModelConfig, layout: Layout, *, time: int = 13, documents: bool = False) -> None:
    alone, spread = Transformer(shape), Transformer(shape)
    alone.z_loss = spread.z_loss = 1e-3
    losses, weights = train(alone, None, time=time, documents=documents)
    mesh = lay_out(spread, layout)
    found, spread_weights = train(spread, mesh, time=time, documents=documents)
    dist.all_reduce(found)
    torch.testing.assert_close(found / dist.get_world_size(), losses, rtol=1e-6, atol=1e-6)
    assert spread_weights.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(spread_weights[name], weight, rtol=1e-4, atol=2e-6, msg=f"{layout} {name}")
    tokens = torch.arange(2 * time).view(2, time) % VOCAB
    with torch.no_grad():
        torch.testing.assert_close(spread(tokens), alone(tokens), rtol=1e-4, atol=1e-5)
