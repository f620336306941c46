"""On a CUDA device: what is on the host costs no device memory and changes no result."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piledriver.engine.activations import apply_activation_checkpointing
from piledriver.engine.activations import offload as activations_offload
from piledriver.engine.apply import apply, apply_optimizer
from piledriver.engine.compile import apply_compile, compile_report
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.offload import apply_offload
from piledriver.engine.offload import gradients as offload_gradients
from piledriver.engine.offload.apply import offload_optimizer
from piledriver.engine.optimizer.loss_scale import LossScale, LossScaler
from piledriver.engine.optimizer.parameter_map import ParameterMap
from piledriver.engine.optimizer.stochastic_rounding import round_stochastically
from piledriver.engine.precision import apply_precision
from piledriver.engine.tiers import Offload
from piledriver.models import ModelConfig, Transformer
from piledriver.optim import clip_gradients
from tests.checkpoint.processes import run as on_ranks
from tests.engine.gpu import ON_GPU

pytestmark = ON_GPU

CUDA = torch.device("cuda")
CONFIG = ModelConfig(vocab_size=512, dim=512, layers=8, heads=8)


def run(
    layout: Layout,
    steps: int = 4,
    *,
    batch: int = 4,
    length: int = 256,
    config: ModelConfig = CONFIG,
    clips: bool = True,
) -> tuple[list[float], int]:
    """Losses, and the most device memory of the last step."""
    gc.collect()
    torch.cuda.empty_cache()
    model = Transformer(config)
    if not layout.streams_parameters:
        model.to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    apply_precision(model, make_mesh(layout, "cuda"))
    apply_activation_checkpointing(model, make_mesh(layout, "cuda"))
    apply_compile(model, make_mesh(layout, "cuda"))
    apply_offload(model, make_mesh(layout, "cuda"), CUDA)
    offload_optimizer(optimizer)
    tokens = torch.randint(512, (steps, batch, length + 1), generator=torch.Generator().manual_seed(0)).to(CUDA)
    losses = []
    for step in range(steps):
        torch.cuda.reset_peak_memory_stats()
        sums = model(tokens[step, :, :-1], targets=tokens[step, :, 1:])
        (sums.total / sums.tokens).backward()
        held = [getattr(parameter, "optimizer_shard", parameter) for parameter in model.parameters()]
        if clips:
            clip_gradients(held, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((sums.total / sums.tokens).item())
    return losses, torch.cuda.max_memory_allocated()


def test_states_and_weights_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    # All gradients of so small a model would fit on the way; and few tokens, so that they are what there is most of.
    monkeypatch.setattr(offload_gradients, "MOST_BYTES_UNDERWAY", 1 << 23)
    model_bytes = sum(p.numel() for p in Transformer(CONFIG).parameters()) * 4
    plain, all_here = run(Layout(compile=False), batch=1, length=32)
    states, less = run(Layout(compile=False, offload="optimizer"), batch=1, length=32)
    weights, least = run(Layout(compile=False, offload="parameters"), batch=1, length=32)
    assert states == pytest.approx(plain, rel=1e-4)
    assert weights == pytest.approx(plain, rel=1e-4)
    # Weights, gradients and two moments; the weights, as the gradients leave; two blocks of them.
    sizes = (all_here, less, least, model_bytes)
    assert all_here > 3.9 * model_bytes, sizes
    assert less < 1.8 * model_bytes, sizes
    assert less - least > 0.5 * model_bytes, sizes


def test_bf16_weights_on_the_device_with_masters_on_the_host() -> None:
    plain, all_here = run(Layout(compile=False, precision="bf16"))
    for offload in ("optimizer", "parameters"):
        losses, less = run(Layout(compile=False, precision="bf16", offload=offload))  # type: ignore[arg-type]
        assert losses == pytest.approx(plain, rel=1e-2)
        assert less < 0.6 * all_here, (offload, less, all_here)


@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters"])
def test_with_compiled_blocks(offload: Any) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, _ = run(Layout(compile=False, precision="bf16"))
    layout = Layout(compile=True, precision="bf16", offload=offload, activations="selective", activation_offload=True)
    losses, _ = run(layout)
    assert losses == pytest.approx(plain, rel=1e-2)
    assert not compile_report().breaks


def gradients(layout: Layout) -> tuple[list[Tensor], int]:
    gc.collect()
    torch.cuda.empty_cache()
    model = Transformer(CONFIG).to(CUDA)
    apply_activation_checkpointing(model, make_mesh(layout, "cuda"))
    tokens = torch.randint(512, (16, 257), generator=torch.Generator().manual_seed(0)).to(CUDA)
    for _ in range(2):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sums = model(tokens[:, :-1], targets=tokens[:, 1:])
        (sums.total / sums.tokens).backward()
    return [p.grad for p in model.parameters() if p.grad is not None], torch.cuda.max_memory_allocated() - before


def test_activations_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations_offload, "SMALLEST_BYTES", 1 << 16)
    expected, all_here = gradients(Layout())
    for activations in ("keep", "full"):
        found, less = gradients(Layout(activations=activations, activation_offload=True))  # type: ignore[arg-type]
        for ours, theirs in zip(found, expected, strict=True):
            # Equal bits are proved on the CPU: here attention adds up its gradients in any order.
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())
        assert less < 0.7 * all_here, (activations, less, all_here)


def test_rounding_is_the_same_on_every_device() -> None:
    results = []
    for device in ("cpu", "cuda"):
        weight = nn.Parameter(torch.linspace(-1, 1, 4096, device=device).to(torch.bfloat16))
        optimizer = torch.optim.SGD([weight], lr=2.0**-10)
        round_stochastically(optimizer)
        for _ in range(3):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        results.append(weight.detach().cpu())
    assert torch.equal(*results)


def test_fp16_finds_its_scale() -> None:
    model = Transformer(CONFIG).to(CUDA)
    apply_precision(model, make_mesh(Layout(precision="fp16"), "cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = LossScaler(LossScale(initial=2.0**40, hysteresis=1), device=CUDA, models=[model])
    tokens = torch.randint(512, (4, 129), device=CUDA)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        sums = model(tokens[:, :-1], targets=tokens[:, 1:])
        scaler.scale(sums.total / sums.tokens).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append((sums.total / sums.tokens).item())
    assert 0 < scaler.skipped < 35
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "disk"},
        {"optimizer": "disk", "optimizer_share": 0.5, "gradients": "disk"},
        {"optimizer": "disk", "parameters": "disk"},
        {"optimizer": "disk", "optimizer_share": 0.5, "parameters": "disk", "parameters_share": 0.5},
    ],
)
def test_disk_is_bit_equal_to_host_memory(tmp_path: Path, options: Any) -> None:
    torch.manual_seed(0)
    like: Any = "parameters" if "parameters" in options else "optimizer"
    expected, _ = run(Layout(precision="bf16", compile=False, offload=like))
    torch.manual_seed(0)
    tiers = Offload(folder=str(tmp_path), buffer_bytes=1 << 22, **options)
    found, _ = run(Layout(precision="bf16", compile=False, offload=tiers))
    assert found == expected


def test_blocks_that_step_in_the_backward_on_a_gpu(tmp_path: Path) -> None:
    """Wherever weights, masters and states live, losses are those of `offload="optimizer"`, bit for bit."""
    on_disk: Any = {"optimizer": "disk", "folder": str(tmp_path), "buffer_bytes": 1 << 22}
    found = []
    for offload in (
        "optimizer",
        Offload(gradients="step"),
        Offload(gradients="step", parameters="host"),
        Offload(gradients="step", optimizer_share=0.5, **on_disk),
        Offload(gradients="step", parameters="disk", **on_disk),
    ):
        torch.manual_seed(0)
        found.append(run(Layout(precision="bf16", compile=False, offload=offload), clips=False)[0])  # type: ignore[arg-type]
    assert found[1:] == [found[0]] * 4


def test_a_model_made_without_memory_starts_alike_in_every_tier(tmp_path: Path) -> None:
    found = []
    for offload in ("optimizer", "parameters", Offload(optimizer="disk", parameters="disk", folder=str(tmp_path))):
        layout = Layout(precision="bf16", compile=False, offload=offload)  # type: ignore[arg-type]
        with torch.device("meta"):
            model: nn.Module = Transformer(ModelConfig(vocab_size=64, dim=64, layers=2, heads=2, tied=True))
        model = apply(model, make_mesh(layout, "cuda"), device=CUDA)
        tokens = torch.arange(32, device=CUDA)[None]
        sums = model(tokens[:, :-1], targets=tokens[:, 1:])
        found.append(({name: value.cpu() for name, value in model.state_dict().items()}, sums.total.item()))
    for state, loss in found[1:]:
        assert loss == found[0][1]
        assert all(torch.equal(state[name], value) for name, value in found[0][0].items())


def losses_on_two(rank: int, folder: str) -> list[list[float]]:
    found = []
    for zero, offload in (
        (1, "optimizer"),
        (1, Offload(optimizer="disk", parameters="disk", folder=folder)),
        (3, "optimizer"),
        (3, Offload(optimizer="disk", parameters="disk", gradients="step", folder=folder)),
    ):
        layout = Layout(zero=zero, precision="bf16", compile=False, offload=offload)  # type: ignore[arg-type]
        with torch.device("meta"):
            model: nn.Module = Transformer(ModelConfig(vocab_size=64, dim=64, layers=2, heads=2, tied=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        mesh, parameters, before = make_mesh(layout, "cuda"), ParameterMap(), dict(model.named_parameters())
        model = apply(model, mesh, device=CUDA)
        parameters.record(model, before)
        apply_optimizer(optimizer, mesh, parameters)
        losses = []
        for step in range(3):
            tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(2 * step + rank)).to(CUDA)
            sums = model(tokens[:, :-1], targets=tokens[:, 1:])
            (sums.total / sums.tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append((sums.total / sums.tokens).item())
        found.append(losses)
    return found


@pytest.mark.slow
def test_two_processes_that_share_a_gpu(tmp_path: Path) -> None:
    """Over gloo: rows (zero 1) and shards (zero 3) on disk train as those on the device do, bit for bit."""
    for rows, rows_on_disk, shards, shards_on_disk in on_ranks(2, losses_on_two, str(tmp_path)):
        assert rows_on_disk == rows
        assert shards_on_disk == shards
