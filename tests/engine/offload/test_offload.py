"""A run whose states or weights live on the host is the run where they do not, and its checkpoints are the same."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from piledriver.checkpoint.parameter_names import names_by_id
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.offload import apply_offload
from piledriver.engine.offload.apply import offload_optimizer, offload_policy
from piledriver.engine.optimizer.global_norm import clip_sharded_grad_norm
from piledriver.engine.optimizer.loss_scale import LossScale, LossScaler
from piledriver.engine.precision import apply_precision
from piledriver.models import ModelConfig, Transformer
from tests.checkpoint.processes import run as on_ranks

CPU = torch.device("cpu")
TOKENS = torch.randint(32, (6, 4, 9), generator=torch.Generator().manual_seed(0))


def make(layout: Layout, *, tied: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = Transformer(ModelConfig(vocab_size=32, dim=16, layers=3, heads=2, tied=tied))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
    apply_precision(model, make_mesh(layout, "cpu"))
    apply_offload(model, make_mesh(layout, "cpu"), CPU)
    offload_optimizer(optimizer)
    return model, optimizer, scheduler


def train(run: tuple[nn.Module, torch.optim.Optimizer, Any], steps: range, *, parts: int = 2) -> list[float]:
    """Losses and norms, of batches that come in parts, with clipping that bites."""
    model, optimizer, scheduler = run
    seen = []
    for step in steps:
        for tokens in TOKENS[step].chunk(parts):
            sums = model(tokens[:, :-1], targets=tokens[:, 1:])
            (sums.total / sums.tokens / parts).backward()
        norm = clip_sharded_grad_norm(list(model.parameters()), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen += [sums.total.item(), float(norm)]
    return seen


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().float().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_a_model_that_is_gone_leaves_nothing(offload: Any) -> None:
    run = make(Layout(offload=offload))
    train(run, range(2))
    held = [weakref.ref(parameter) for parameter in run[0].parameters()]
    held += [weakref.ref(master) for group in run[1].param_groups for master in group["params"]]
    del run
    gc.collect()
    assert sum(one() is not None for one in held) == 0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_fp32_is_exact(offload: Any, tied: bool) -> None:
    plain, ours = make(Layout(), tied=tied), make(Layout(offload=offload), tied=tied)
    assert train(ours, range(3)) == train(plain, range(3))
    for name, value in weights(plain[0]).items():
        assert torch.equal(weights(ours[0])[name], value), name


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_bf16_keeps_small_weights_on_the_device_and_fp32_masters(offload: Any) -> None:
    plain, ours = make(Layout(precision="bf16")), make(Layout(precision="bf16", offload=offload))
    assert ours[0].blocks["0"].attention.out.weight.dtype == torch.bfloat16  # type: ignore[union-attr, index]
    assert ours[0].state_dict()["blocks.0.attention.out.weight"].dtype == torch.float32
    # A bf16 weight has the values that a fp32 one is cast to; its gradient is rounded to bf16 once more.
    first = train(ours, range(3))
    assert first == pytest.approx(train(plain, range(3)), rel=2e-3)
    found = weights(ours[0])
    for name, value in weights(plain[0]).items():
        torch.testing.assert_close(found[name], value, atol=2e-2, rtol=0)
        # Masters move by less than bf16 could hold.
        assert value.dim() == 1 or not torch.equal(found[name], found[name].bfloat16().float())


def test_blocks_are_on_the_device_only_while_they_compute() -> None:
    model, *_ = make(Layout(offload="parameters"))

    def here() -> list[str]:
        return [n for n, p in model.named_parameters() if "blocks" in n and p.untyped_storage().nbytes()]

    assert here() == []
    most = []
    for number, block in enumerate(model.blocks.values()):  # type: ignore[union-attr, operator]
        block.attention.register_forward_hook(
            lambda *_, number=number: most.append({int(n.split(".")[1]) - number for n in here()})
        )
    sums = model(TOKENS[0, :, :-1], targets=TOKENS[0, :, 1:])
    assert most == [{0, 1}, {0, 1}, {0}]
    assert here() == []
    sums.total.backward()
    assert here() == []
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.optimizer_shard.grad is not None for parameter in model.parameters())  # type: ignore[attr-defined]
    model.zero_grad()
    assert all(parameter.optimizer_shard.grad is None for parameter in model.parameters())  # type: ignore[attr-defined]
    with torch.no_grad():
        model(TOKENS[0, :, :-1])
    assert here() == []


KINDS = ["none", "optimizer", "parameters"]


@pytest.mark.parametrize(("first", "second"), [(a, b) for a in KINDS for b in KINDS if a != b])
def test_checkpoints_move_between_offloads(first: Any, second: Any) -> None:
    before, straight = make(Layout(offload=first)), make(Layout(offload=first))
    train(before, range(2))
    expected = train(straight, range(4))[4:]
    after = make(Layout(offload=second))
    saved = copy.deepcopy([thing.state_dict() for thing in before])
    for thing, state in zip(after, saved, strict=True):
        thing.load_state_dict(state)
    assert train(after, range(2, 4)) == expected
    names = names_by_id([after[0]])
    assert {names[id(p)] for group in after[1].param_groups for p in group["params"]} == set(
        dict(after[0].named_parameters())
    )


def test_masters_that_are_read_into_reach_the_device() -> None:
    """Our checkpoints read into the tensors of the state dict, in place."""
    source = weights(make(Layout())[0])
    for offload in ("optimizer", "parameters"):
        model, *_ = make(Layout(offload=offload))  # type: ignore[arg-type]
        with torch.no_grad():
            for name, value in model.state_dict(keep_vars=True).items():
                value.copy_(2 * source[name])
        other = make(Layout())[0]
        other.load_state_dict({name: 2 * value for name, value in source.items()})
        assert torch.equal(model(TOKENS[0]), other(TOKENS[0]))


def test_a_state_that_was_there_goes_along_and_scaled_gradients_are_unscaled() -> None:
    plain = make(Layout())
    model, optimizer, scheduler = make(Layout())
    train(plain, range(1))
    train((model, optimizer, scheduler), range(1))
    apply_offload(model, make_mesh(Layout(offload="optimizer"), "cpu"), CPU)
    offload_optimizer(optimizer)
    assert train((model, optimizer, scheduler), range(1, 3)) == train(plain, range(1, 3))

    scaler, reached = LossScaler(LossScale(initial=8.0)), []
    for run in (plain, (model, optimizer, scheduler)):
        sums = run[0](TOKENS[0, :, :-1], targets=TOKENS[0, :, 1:])
        scaler.scale(sums.total / sums.tokens).backward()
        scaler.step(run[1])
        reached.append(weights(run[0]))
        run[1].zero_grad()
    scaler.update()
    assert all(torch.equal(reached[0][name], reached[1][name]) for name in reached[0])


def process(rank: int) -> None:
    results = []
    for offload in KINDS:
        layout = Layout(zero=3, offload=offload)  # type: ignore[arg-type]
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        for module in (*model, model):
            fully_shard(module, offload_policy=offload_policy(layout, "cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        apply_offload(model, make_mesh(layout, "cpu"), CPU)
        offload_optimizer(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            model(
                torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
            ).square().mean().backward()
            norm = clip_sharded_grad_norm(list(model.parameters()), 0.1)
            optimizer.step()
        held = [value.full_tensor() for value in model.state_dict().values() if isinstance(value, DTensor)]
        assert len(held) == 6
        results.append((float(norm), held))
        if offload == "optimizer":
            (state, *_) = optimizer.state.values()
            assert isinstance(state["exp_avg"], DTensor)
    for norm, held in results[1:]:
        assert norm == results[0][0]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(held, results[0][1], strict=True))


@pytest.mark.slow
def test_shards_on_the_host_train_as_shards_do() -> None:
    on_ranks(2, process)
