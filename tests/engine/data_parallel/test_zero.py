"""Zero 0 to 3: the memory that each stage promises, models without memory, windows, optimizers, gradients."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from piledriver.accelerator import Accelerator, GradientAccumulationPlugin
from piledriver.checkpoint import load_model, save_model
from piledriver.engine import Layout
from piledriver.engine.activations.saved_bytes import HeldBytes
from piledriver.engine.apply import apply
from piledriver.engine.memory import expected_bytes
from piledriver.engine.mesh import make_mesh
from piledriver.models import ModelConfig, Transformer
from piledriver.optim import CompactAdamW
from piledriver.runtime.world import group_world
from tests.checkpoint.processes import run as on_ranks

CONFIG = ModelConfig(vocab_size=256, dim=64, layers=4, heads=4, mlp_dim=128, max_positions=32, tied=False)
CPU = torch.device("cpu")


def accelerator(layout: Layout, **options: Any) -> Accelerator:
    return Accelerator(world=group_world(), layout=layout, **options)


def four_processes(rank: int, folder: str) -> None:
    memory_follows_the_formula()
    a_model_without_memory(rank, folder)
    own_modules_without_memory()
    eight_bit_states()
    norms_are_those_of_one_process(rank)


def memory_follows_the_formula() -> None:
    parameters = sum(p.numel() for p in Transformer(CONFIG).parameters())
    for zero in (0, 1, 2, 3):
        run = accelerator(Layout(zero=zero))
        model = Transformer(CONFIG)
        before = weakref.ref(model.blocks["0"].attention.qkv.weight)
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters()))
        gc.collect()
        # Nobody keeps the whole parameter that a part took the place of.
        assert (before() is None) == (zero == 3)
        tokens = torch.randint(256, (2, 8))
        for step in range(2):
            sums = model(tokens, tokens)
            run.backward(sums.total / sums.tokens)
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        wanted, found = expected_bytes(parameters, Layout(zero=zero).on(4)), run.memory_report()
        for name in ("parameters", "gradients", "optimizer_state", "total"):
            # 16 bytes a parameter, divided as the stage says; the rest is step counters and rounding up to rows.
            assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=0.1), (zero, name, str(found))
        run.free_memory()


class Peak(HeldBytes):
    """The most bytes that were alive at a time; on the meta device there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                self.seen.pop(
                    (leaf._local_tensor if isinstance(leaf, DTensor) else leaf).untyped_storage()._cdata, None
                )
        self.most = max(self.most, self.count())
        return out


def a_model_without_memory(rank: int, folder: str) -> None:
    whole = Transformer(CONFIG, seed=0)
    size = sum(p.numel() * 4 for p in whole.parameters())
    largest = max(p.numel() * 4 for p in whole.parameters())
    save_model(whole, folder)
    for source in ("seed", "folder"):
        for layout in (Layout(zero=3), Layout(zero=3, tp=2)):
            with torch.device("meta"):
                model = Transformer(CONFIG)
            weights: Any = 0 if source == "seed" else lambda laid: load_model(laid, folder)
            with Peak() as peak:
                apply(model, make_mesh(layout, "cpu"), device=CPU, weights=weights)
            # A quarter of the model at rest, and while it is filled one parameter that is drawn whole and dealt out.
            assert peak.most < size / 4 + 3 * largest < 0.75 * size, (peak.most, size)
            for name, value in model.state_dict().items():
                assert isinstance(value, DTensor)
                assert torch.equal(value.full_tensor(), whole.state_dict()[name]), name
    with torch.device("meta"):
        model = Transformer(CONFIG)
    run = accelerator(Layout(zero=3))
    model = run.prepare_model(model, weights=folder)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in run.get_state_dict(model).items())
    run.save_model(model, Path(folder) / "again")
    assert load_model(Transformer(CONFIG, seed=9), Path(folder) / "again").exact


class Own(nn.Module):
    """A user's modules, some with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 6)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(6)


def own_modules_without_memory() -> None:
    states = []
    for layout in (Layout(zero=3), Layout(zero=3, dp_replicate=2), Layout()):
        with torch.device("meta"):
            model = Own()
        apply(model, make_mesh(layout, "cpu"), device=CPU, weights=5)
        states.append({k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()})
    assert states[0]["layers.0.0.weight"].std() > 0.1
    for other in states[1:]:
        assert all(torch.equal(value, other[key]) for key, value in states[0].items())


def eight_bit_states() -> None:
    """An optimizer with states of its own shapes shares them out too, and steps like the whole one."""
    finals = []
    for layout in (Layout(), Layout(zero=1), Layout(zero=2), Layout(zero=3)):
        run = accelerator(layout)
        model = Transformer(CONFIG)
        model, optimizer = run.prepare(model, CompactAdamW(model.parameters(), lr=1e-2))
        for step in range(2):
            tokens = torch.full((2, 8), step)
            sums = model(tokens, tokens)
            run.backward(sums.total / sums.tokens)
            optimizer.step()
            optimizer.zero_grad()
        finals.append(run.get_state_dict(model))
        run.free_memory()
    for final in finals[1:]:
        for key, value in finals[0].items():
            torch.testing.assert_close(final[key], value, atol=1e-5, rtol=1e-4)


def norms_are_those_of_one_process(rank: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    data = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(1))
    reference = copy.deepcopy(plain)
    reference(data.flatten(0, 1)).square().mean().backward()
    for norm_type in (2.0, 1.0, float("inf")):
        wanted = nn.utils.get_total_norm([p.grad for p in reference.parameters()], norm_type)
        for zero in (0, 1, 2, 3):
            run = accelerator(Layout(zero=zero))
            model = run.prepare(copy.deepcopy(plain))
            run.backward(model(data[rank]).square().mean())
            torch.testing.assert_close(run.clip_grad_norm_(model.parameters(), 0.1, norm_type), wanted)
            clipped = run.clip_grad_norm_(model.parameters(), 1e9, norm_type)
            assert float(clipped) == pytest.approx(min(0.1, float(wanted)), rel=1e-4)
            run.free_memory()


@pytest.mark.slow
def test_zero_on_four_processes(tmp_path: Path) -> None:
    on_ranks(4, four_processes, str(tmp_path))


class Branches(nn.Module):
    """One part that only rank 1 uses, one that nobody uses, one that is frozen, one number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.sometimes, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, more: bool) -> torch.Tensor:
        x = self.frozen(self.used(x)) * self.scale
        return (self.sometimes(x) if more else x).square().mean()


def two_processes(rank: int) -> None:
    for zero in (0, 1, 2):
        branches(rank, zero)
    for layout in (Layout(), Layout(zero=1), Layout(zero=2), Layout(zero=3), Layout(tp=2), Layout(cp=2, zero=3)):
        windows_weigh_every_item_alike(rank, layout)
    for zero in (1, 2, 3):
        windows_weigh_every_item_alike(rank, Layout(zero=zero), sync_each_batch=True)
        the_optimizer_may_come_before_or_after(zero)
    metrics_count_each_sample_once(rank)
    a_backward_that_failed_leaves_nothing_behind(rank)


def branches(rank: int, zero: Any) -> None:
    x = torch.arange(6.0).reshape(2, 3) + rank
    run = accelerator(Layout(zero=zero))
    model = run.prepare(Branches())
    optimizer = run.prepare(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    expected = [Branches(), Branches()]
    for other, one in enumerate(expected):
        one(torch.arange(6.0).reshape(2, 3) + other, other == 1).backward()
    run.backward(model(x, rank == 1))
    for name, parameter in model.named_parameters():
        gradients = [one.get_parameter(name).grad for one in expected]
        held = getattr(parameter, "optimizer_shard", parameter).grad
        if all(gradient is None for gradient in gradients):
            assert held is None, name
            continue
        mean = torch.stack([torch.zeros_like(parameter) if g is None else g for g in gradients]).mean(0)
        torch.testing.assert_close(held.full_tensor() if isinstance(held, DTensor) else held, mean)
    # Local gradients stay local, and either way of clearing them clears all of them.
    model.zero_grad()
    assert all(p.grad is None and getattr(p, "optimizer_shard", p).grad is None for p in model.parameters())
    with run.no_sync(model):
        run.backward(model(x, True))
    alone = Branches()
    alone(x, True).backward()
    torch.testing.assert_close(model.used.weight.grad, alone.used.weight.grad)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    run.free_memory()


class Breaks(torch.autograd.Function):
    """A backward that fails half way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise MemoryError("made up")


def a_backward_that_failed_leaves_nothing_behind(rank: int) -> None:
    for zero in (0, 2):
        torch.manual_seed(0)
        run = accelerator(Layout(zero=zero))
        model = run.prepare(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        with pytest.raises(MemoryError):
            run.backward(model[1](Breaks.apply(model[0](torch.ones(1, 3)))).sum())
        model.zero_grad()
        run.backward(model(torch.full((1, 3), float(rank))).sum())
        held = getattr(model[0].weight, "optimizer_shard", model[0].weight).grad
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, held.full_tensor() if isinstance(held, DTensor) else held)
        assert torch.equal(everyone[0], everyone[1])
        assert everyone[0].abs().sum() > 0
        run.free_memory()


def metrics_count_each_sample_once(rank: int) -> None:
    for layout in (Layout(), Layout(zero=3), Layout(tp=2), Layout(cp=2), Layout(pp=2)):
        run = accelerator(layout)
        loader = run.prepare(DataLoader(torch.arange(7), batch_size=2))
        seen = [number for batch in loader for number in run.gather_for_metrics(batch).tolist()]
        assert seen == list(range(7)), layout
        total = run.reduce(torch.tensor([1.0]), "sum").item()
        assert total == run.mesh.layout.data_size


def windows_weigh_every_item_alike(rank: int, layout: Layout, sync_each_batch: bool = False) -> None:
    """Counted windows give the gradient of one process with all items at once, whoever holds them."""
    generator = torch.Generator().manual_seed(3)
    lengths = [3, 1, 4, 2]
    # Rows of one length with different numbers of targets that count.
    tokens = torch.randint(256, (4, 2, 8), generator=generator)
    targets = tokens.clone()
    for part, length in enumerate(lengths):
        targets[part, :, length:] = -100
    reference = Transformer(CONFIG)
    sums = reference(tokens.flatten(0, 1), targets.flatten(0, 1))
    (sums.total / sums.tokens).backward()
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False, sync_each_batch=sync_each_batch)
    run = accelerator(layout, gradient_accumulation_plugin=plugin)
    model = run.prepare(Transformer(CONFIG))
    assert run.mesh is not None
    mine = run.mesh.data_rank
    parts = [0, 1, 2, 3] if run.mesh.layout.data_size == 1 else [2 * mine, 2 * mine + 1]
    for first, second in zip(parts[0::2], parts[1::2], strict=True):
        if run.mesh.layout.data_size == 1:
            # One reader takes all four parts, two in each batch of the window.
            x, y = torch.cat((tokens[first], tokens[second])), torch.cat((targets[first], targets[second]))
            _one_batch(run, model, x, y)
        else:
            _one_batch(run, model, tokens[first], targets[first])
            _one_batch(run, model, tokens[second], targets[second])
    for name, parameter in reference.named_parameters():
        held = model.get_parameter(name)
        gradient = getattr(held, "optimizer_shard", held).grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(whole, parameter.grad, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    run.free_memory()


def _one_batch(run: Accelerator, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    with run.accumulate(model, count=int((y != -100).sum())):
        sums = model(x, y)
        run.backward(sums.total / sums.tokens)


def the_optimizer_may_come_before_or_after(zero: Any) -> None:
    finals = []
    for when in ("with", "after", "first"):
        run = accelerator(Layout(zero=zero))
        model = Transformer(CONFIG)
        groups = [{"params": [p], "lr": 1e-3 * (i + 1)} for i, p in enumerate(model.parameters())]
        if when == "with":
            optimizer, model = run.prepare(torch.optim.AdamW(groups), model)
        elif when == "first":
            optimizer = run.prepare(torch.optim.AdamW(groups))
            model = run.prepare(model)
        else:
            model = run.prepare(model)
            groups = [{"params": [p], "lr": 1e-3 * (i + 1)} for i, p in enumerate(model.parameters())]
            optimizer = run.prepare(torch.optim.AdamW(groups))
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in groups]
        for _ in range(2):
            tokens = torch.arange(16).reshape(2, 8) + 7 * dist.get_rank()
            sums = model(tokens, tokens)
            run.backward(sums.total / sums.tokens)
            optimizer.step()
            optimizer.zero_grad()
        finals.append(run.get_state_dict(model))
        run.free_memory()
    for other in finals[1:]:
        assert all(torch.equal(value, other[key]) for key, value in finals[0].items())


@pytest.mark.slow
def test_gradients_on_two_processes() -> None:
    on_ranks(2, two_processes)
