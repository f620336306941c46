"""One rank of the sharded train steps, which `test_sharded.py` starts: it fails where a layout differs."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

import piledriver.functional as F
from piledriver.engine import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.functional.errors import PartitionError
from piledriver.functional.partitioning import Sharding, as_device_mesh, merge_processes, whole

RULES = {"batch": "data", "vocab": "tensor", "mlp": "tensor", "heads": "tensor", "kv_heads": "tensor"}
# Each new mesh costs every process seconds of torch's own thinking, so four processes try only what two cannot.
MESHES = {2: [(2, 1), (1, 2)], 4: [(2, 2)]}
STEPS = 2


def model(**changes: Any) -> F.Decoder:
    return F.Decoder(vocab_size=64, dim=32, depth=1, heads=4, kv_heads=4, mlp_dim=64, **changes)


def batch(step: int) -> torch.Tensor:
    return F.randint(F.fold_in(F.key(1), step), (8, 13), 0, 64)


def train_step(
    state: F.TrainState, tokens: torch.Tensor, sharding: Sharding | None
) -> tuple[F.TrainState, torch.Tensor]:
    """Pure, and the same whatever the layout."""

    def loss(params: F.Tree) -> torch.Tensor:
        return F.cross_entropy(state.apply(params, tokens[:, :-1], sharding=sharding), tokens[:, 1:])

    value, grads = F.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads), value


def run(sharding: Sharding | None, **changes: Any) -> tuple[list[float], F.Tree]:
    net, optimizer = model(**changes), F.chain(F.clip_by_global_norm(1.0), F.adamw(1e-2, mask=F.not_vectors))
    example = batch(0)[:, :-1]
    variables = net.init(F.key(0), example) if sharding is None else sharding.init(net, F.key(0), example)
    state = F.TrainState.create(net.apply, variables, optimizer)
    losses = []
    for step in range(STEPS):
        tokens = batch(step) if sharding is None else sharding.batch(batch(step))
        state, value = train_step(state, tokens, sharding)
        losses.append(float(whole(value)))
    return losses, whole(state.params)


def check_layout(shape: tuple[int, int], expected: tuple[list[float], F.Tree]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    sharding = Sharding(mesh, RULES)
    losses, params = run(sharding)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(F.tree_leaves(params), F.tree_leaves(expected[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    plain = model().init(F.key(0), batch(0))
    sharded = sharding.shard(plain, model().spec(batch(0)))
    assert sharded.at("params.layers_0.mlp.gate.kernel").to_local().shape == (32, 64 // shape[1])
    assert whole(sharded.at("params.embed.embedding")).equal(plain.at("params.embed.embedding"))
    scanned = run(sharding, scan=True)[0]
    torch.testing.assert_close(torch.tensor(scanned), torch.tensor(run(None, scan=True)[0]), rtol=1e-5, atol=1e-5)
    check_dropout(sharding)
    check_sums_not_yet_made(sharding)
    check_recurrence(sharding)
    check_files(sharding)
    check_errors(sharding, shape)


def check_mesh_of_a_layout(expected: tuple[list[float], F.Tree]) -> None:
    """The mesh of an engine's layout shards a functional model; its axes of one rank are left out."""
    layout = Layout(zero=3, tp=2) if dist.get_world_size() == 4 else Layout(tp=2)
    mesh = make_mesh(layout, "cpu")
    rules = {"vocab": "tp", "mlp": "tp", "heads": "tp", "kv_heads": "tp", "batch": "dp_shard"}
    names = as_device_mesh(mesh).mesh_dim_names
    assert names == (("dp_shard", "tp") if dist.get_world_size() == 4 else ("tp",))
    losses, _ = run(Sharding(mesh, {axis: target for axis, target in rules.items() if target in names}))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-5, atol=1e-5)
    merged = merge_processes(F.Average.from_batch(torch.ones(2)), mesh)
    assert float(merged.weight) == 2 * dist.get_world_size()


def check_dropout(sharding: Sharding) -> None:
    """The mask does not depend on the number of processes."""
    x, rngs = torch.ones(8, 6), {"dropout": F.key(3)}
    dropped = F.Dropout(0.5, deterministic=False).apply({}, sharding.batch(x), rngs=rngs)
    assert whole(dropped).equal(F.Dropout(0.5, deterministic=False).apply({}, x, rngs=rngs))


def check_sums_not_yet_made(sharding: Sharding) -> None:
    """An optimizer's step on sums not yet made leaves a table of parts; rows of it are still whole rows."""
    part = torch.full((6, 4), 1.0 / sharding.mesh.size())
    table = DTensor.from_local(part, sharding.mesh, [Partial(), Partial()], run_check=False)
    found = F.Embed(6, 4).apply({"params": {"embedding": table}}, sharding.batch(torch.arange(6).repeat(2)[:8]))
    torch.testing.assert_close(whole(found), torch.ones(8, 4))


def check_recurrence(sharding: Sharding) -> None:
    """The first carry is laid out as the input is."""
    net, x = F.RNN(F.LSTMCell(3)), F.normal(F.key(4), (8, 2, 4))
    variables = net.init(F.key(0), x)
    found = net.apply(sharding.init(net, F.key(0), x), sharding.batch(x))
    torch.testing.assert_close(whole(found), net.apply(variables, x))


def check_files(sharding: Sharding) -> None:
    """Saved by all, loaded by one, and loaded by all in the layout that is there."""
    net, x = F.LoRADense(8, 2, kernel_axes=("embed", "mlp")), torch.ones(4, 6)

    def state(seed: int, variables: F.Tree | None = None) -> F.TrainState:
        made = sharding.init(net, F.key(seed), x) if variables is None else variables
        return F.TrainState.create(net.apply, made, F.adamw(1e-2))

    saved = state(0)
    folder = dist.get_world_size() * [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    file = Path(folder[0]) / f"{sharding.mesh.size(0)}.safetensors"
    F.save_safetensors(saved, file)
    dist.barrier()
    plain = net.init(F.key(0), x)
    assert F.restore_safetensors(state(1, net.init(F.key(1), x)), file).params == plain["params"]
    for again in (F.restore_safetensors(state(1), file), F.from_bytes(state(1), F.to_bytes(saved))):
        assert again.params["kernel"].placements == saved.params["kernel"].placements
        assert whole(again.params) == plain["params"]
    moved, report = F.transfer(plain["params"], state(1).params)
    assert report.is_complete
    assert moved["kernel"].placements == saved.params["kernel"].placements
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def check_errors(sharding: Sharding, shape: tuple[int, int]) -> None:
    def refused(message: str, call: object) -> None:
        try:
            call()  # type: ignore[operator]
        except PartitionError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"nothing was refused: {message}")

    refused("names the mesh axis 'tenser'", lambda: Sharding(sharding.mesh, {"mlp": "tenser"}))
    refused("name every dimension", lambda: sharding.placements(("mlp",), (2, 3)))
    wrong = Sharding(sharding.mesh, {"mpl": "tensor"})
    refused("did you mean 'mlp'", lambda: wrong.shard({}, model().spec(batch(0))))
    refused("did you mean 'mlp'", lambda: wrong.init(model(), F.key(0), batch(0)))
    refused("along one mesh axis", lambda: Sharding(sharding.mesh, {"mlp": ("data", "tensor")}))  # type: ignore[dict-item]
    # A name that is of activations alone is no mistake.
    Sharding(sharding.mesh, {"seq": "tensor"}).init(model(), F.key(0), batch(0))
    if shape[1] > 1:
        odd = model().clone(mlp_dim=33)
        refused("params.layers_0.mlp.gate.kernel: the axis 'mlp'", lambda: sharding.init(odd, F.key(0), batch(0)))
        refused("does not divide", lambda: sharding.placements(("mlp",), (7,)))


def check_fsdp(expected: list[float]) -> None:
    """The bridge's nodes are what FSDP shards, block by block."""
    net = F.to_torch(model(), model().init(F.key(0), batch(0)[:, :-1]))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net.layers_0, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=0.0)
    plain = F.to_torch(model(), model().init(F.key(0), batch(0)[:, :-1]))
    plain_optimizer = torch.optim.AdamW(plain.parameters(), 1e-2, weight_decay=0.0)
    mine = slice(dist.get_rank() * 8 // dist.get_world_size(), (dist.get_rank() + 1) * 8 // dist.get_world_size())
    for step in range(STEPS):
        loss = F.cross_entropy(net(batch(step)[mine, :-1]), batch(step)[mine, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain_loss = F.cross_entropy(plain(batch(step)[:, :-1]), batch(step)[:, 1:])
        plain_loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / dist.get_world_size(), plain_loss.detach(), rtol=1e-4, atol=1e-5)
    assert plain_loss.item() != expected[0]


def check_every_layout(rank: int) -> None:
    expected = run(None)
    for shape in MESHES[dist.get_world_size()]:
        check_layout(shape, expected)
    check_mesh_of_a_layout(expected)
    if dist.get_world_size() == 2:
        check_fsdp(expected[0])
    count = dist.get_world_size()
    merged = merge_processes(F.Average.from_batch(torch.full((rank + 1,), float(rank))))
    weights = [i + 1 for i in range(count)]
    assert abs(float(merged.compute()) - sum(i * w for i, w in enumerate(weights)) / sum(weights)) < 1e-6
