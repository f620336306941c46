"""One process of the sharded train steps: prints its losses. Run by test_sharded.py, not by pytest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import piledriver.functional as F
from piledriver.functional.partitioning import Sharding, merge_processes, whole

DATA = {"batch": "data"}
TENSOR = {"vocab": "tensor", "mlp": "tensor", "heads": "tensor", "kv_heads": "tensor"}
STEPS = 4


def model() -> F.Decoder:
    return F.Decoder(vocab_size=64, dim=32, depth=2, heads=4, kv_heads=4, mlp_dim=64, dropout_rate=0.0)


def train_step(
    state: F.TrainState, tokens: torch.Tensor, sharding: Sharding | None
) -> tuple[F.TrainState, torch.Tensor]:
    """Pure, and the same whatever the layout."""

    def loss(params: F.Tree) -> torch.Tensor:
        logits = state.apply(params, tokens[:, :-1], sharding=sharding)
        return F.cross_entropy(logits, tokens[:, 1:])

    value, grads = F.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads), value


def batch(step: int) -> torch.Tensor:
    return F.randint(F.fold_in(F.key(1), step), (8, 13), 0, 64)


def losses(sharding: Sharding | None) -> tuple[list[float], F.Tree]:
    net, optimizer = model(), F.chain(F.clip_by_global_norm(1.0), F.adamw(1e-2))
    example = batch(0)[:, :-1]
    variables = net.init(F.key(0), example) if sharding is None else sharding.init(net, F.key(0), example)
    state = F.TrainState.create(net.apply, variables, optimizer)
    found = []
    for step in range(STEPS):
        tokens = batch(step) if sharding is None else sharding.batch(batch(step))
        state, value = train_step(state, tokens, sharding)
        found.append(float(whole(value)))
    return found, whole(state.params)


def main(out: Path, data: int, tensor: int) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    sharded, params = losses(Sharding(mesh, {**DATA, **TENSOR}))
    plain, expected = losses(None)
    gap = max(
        float((a - b).abs().max()) for a, b in zip(F.tree_leaves(params), F.tree_leaves(expected), strict=True)
    )
    rank = dist.get_rank()
    metric = merge_processes(F.Average.of(torch.arange(rank + 1.0)))
    if rank == 0:
        out.write_text(json.dumps({"sharded": sharded, "plain": plain, "gap": gap, "metric": float(metric.compute())}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
