"""What is computed in which precision, and bf16 weights that learn by rounding stochastically."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.optimizer import stochastic_rounding as stochastic
from piledriver.engine.optimizer.global_norm import total_norm
from piledriver.engine.optimizer.stochastic_rounding import assign_noise_ids, round_stochastically
from piledriver.engine.precision import apply_precision
from piledriver.models import ModelConfig, MoEConfig, Transformer
from piledriver.optim import CompactAdamW, Lion, Muon, SplitMasterAdamW
from tests.checkpoint.processes import run as on_ranks
from tests.optim.problems import Net, batch, train

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9),
    "lion": lambda parameters: Lion(parameters, lr=1e-3),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_of_16_bit_gradients_is_not_rounded(norm_type: float) -> None:
    gradients = [torch.randn(50, generator=torch.Generator().manual_seed(seed)) for seed in range(9)]
    weights = [nn.Parameter(torch.zeros(50, dtype=torch.bfloat16 if i % 3 else torch.float32)) for i in range(9)]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.to(weight.dtype)
    exact = torch.cat([weight.grad.double() for weight in weights if weight.grad is not None]).norm(norm_type)
    assert total_norm(list(weights), norm_type).item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-pure", "fp8-pure"])
@pytest.mark.parametrize("made", [Net, lambda: Transformer(ModelConfig(vocab_size=20, dim=64, layers=2, heads=2))])
def test_weights_and_activations_have_the_dtype_asked_for(precision: str, made: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = made()
    plain.register_buffer("table", torch.ones(2))
    tokens = batch(0)[0].view(4, 16)
    expected = plain(tokens).detach()
    model = apply_precision(copy.deepcopy(plain), make_mesh(Layout(precision=precision), "cpu"))  # type: ignore[arg-type]
    seen = []
    inner = next(m for m in model.modules() if isinstance(m, nn.Linear))
    inner.register_forward_hook(lambda _module, _args, out: seen.append(out.dtype))
    out = model(tokens)
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)
    assert (out.float() - expected).abs().max() > 0
    assert seen == [torch.float16 if precision == "fp16" else torch.bfloat16]
    kept = torch.bfloat16 if precision.endswith("-pure") else torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {kept}
    assert model.table.dtype == torch.float32
    assert list(model.state_dict()) == list(plain.state_dict())


def pure_net() -> nn.Module:
    model = apply_precision(Net(), make_mesh(Layout(precision="bf16-pure"), "cpu"))
    assign_noise_ids(model)
    return model


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_update_is_the_fp32_one_rounded_up_or_down(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # One parameter a bucket: where buckets are cut makes no difference to the second run below.
    monkeypatch.setattr(stochastic, "BUCKET_ELEMENTS", 1)
    model, wide = pure_net(), Net()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    round_stochastically(optimizer)
    reference = OPTIMIZERS[kind](list(wide.parameters()))
    for step in range(3):
        train(model, optimizer, 0)
        for ours, theirs in zip(model.parameters(), wide.parameters(), strict=True):
            ours.grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            theirs.data, theirs.grad = ours.detach().float(), ours.grad.float()
        optimizer.step()
        reference.step()
        for ours, theirs in zip(model.parameters(), wide.parameters(), strict=True):
            exact = theirs.detach()
            down = (exact.view(torch.int32) & -65536).view(torch.float32)
            up = ((exact.view(torch.int32) & -65536) + 65536).view(torch.float32)
            assert ours.dtype == torch.bfloat16
            assert bool(((ours.float() == down) | (ours.float() == up)).all())
    for ours in model.parameters():
        assert {value.dtype for value in optimizer.state[ours].values()} <= {torch.float32}


def test_optimizers_that_round_by_themselves_are_left_alone() -> None:
    for kind in (CompactAdamW, SplitMasterAdamW):
        optimizer = kind(list(pure_net().parameters()))
        round_stochastically(optimizer)
        assert "step" not in optimizer.__dict__
        assert "rounding_step" not in optimizer.param_groups[0]


def test_updates_too_small_for_bf16_are_not_lost() -> None:
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    round_stochastically(optimizer)
    for _ in range(100):
        weight.grad = torch.full_like(weight, 2.0**-12)
        optimizer.step()
    # To nearest, 1 - 2^-12 is 1 again, a hundred times.
    assert weight.float().mean().item() == pytest.approx(1.0 - 100 * 2.0**-12, abs=2e-4)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_schedulers_and_resumed_runs(scheduler_first: bool) -> None:
    def run(steps: range, saved: io.BytesIO | None = None) -> tuple[nn.Module, io.BytesIO]:
        model = pure_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if not scheduler_first:
            round_stochastically(optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        if scheduler_first:
            round_stochastically(optimizer)
        if saved is not None:
            saved.seek(0)
            weights, state, schedule = torch.load(saved)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            scheduler.load_state_dict(schedule)
        for step in steps:
            train(model, optimizer, 1, first=step)
            scheduler.step()
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()), file)
        return model, file

    straight, _ = run(range(4))
    _, file = run(range(2))
    resumed, _ = run(range(2, 4), file)
    for ours, theirs in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_pure_model_learns_like_one_in_fp32() -> None:
    losses = {}
    for precision in ("fp32", "bf16-pure"):
        model = apply_precision(Net(), make_mesh(Layout(precision=precision), "cpu"))  # type: ignore[arg-type]
        optimizer = Muon(
            [
                {"params": [p for p in model.parameters() if p.dim() > 1]},
                {"params": [p for p in model.parameters() if p.dim() == 1], "kind": "vector"},
            ],
            lr=1e-2,
        )
        round_stochastically(optimizer)
        losses[precision] = train(model, optimizer, 30)
    assert losses["bf16-pure"][-1] == pytest.approx(losses["fp32"][-1], rel=0.1)
    assert losses["fp32"][-1] < 0.5 * losses["fp32"][0]


def test_bf16_moments_round_the_same_beside_any_others() -> None:
    """A pipeline's stage holds some of the parameters: their noise follows from their names, not their places."""
    moments = []
    for held in (slice(None), slice(2, None)):
        model = pure_net()
        parameters = list(model.parameters())
        optimizer = SplitMasterAdamW(parameters[held], lr=1e-2, moments="bf16")
        for step in range(3):
            for number, parameter in enumerate(parameters):
                parameter.grad = _noise(parameter.shape, 10 * step + number)
            optimizer.step()
        moments.append([optimizer.state[p][name] for p in parameters[2:] for name in ("exp_avg", "exp_avg_sq")])
    assert any(one.dtype == torch.bfloat16 for one in moments[0])
    assert all(torch.equal(whole, part) for whole, part in zip(*moments, strict=True))


def process(rank: int) -> None:
    for kind in ("adamw", "8-bit", "bf16 moments"):
        results, moments = [], []
        for sharded in (False, True):
            model = pure_net()
            if sharded:
                fully_shard(model)
                assign_noise_ids(model)
            parameters = list(model.parameters())
            optimizer: torch.optim.Optimizer = {
                "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
                "8-bit": functools.partial(CompactAdamW, lr=1e-2),
                "bf16 moments": functools.partial(SplitMasterAdamW, lr=1e-2, moments="bf16"),
            }[kind](parameters)
            round_stochastically(optimizer)
            for step in range(3):
                for number, parameter in enumerate(parameters):
                    whole = _noise(parameter.shape, 10 * step + number)
                    parameter.grad = _like(parameter, whole)
                optimizer.step()
            results.append([p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters])
            if kind == "bf16 moments":
                found = [optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
                moments.append([one.full_tensor() if isinstance(one, DTensor) else one for one in found])
            if sharded and kind == "8-bit":
                state = optimizer.state[parameters[1]]
                assert state["exp_avg"].to_local().dtype == torch.uint8
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs), kind
        for ours, theirs in zip(*moments, strict=True) if moments else ():
            assert torch.equal(ours, theirs), kind
    _columns()


def _columns() -> None:
    """A split along columns rounds as the whole does."""
    whole = nn.Parameter(_noise((6, 8), 0))
    mesh = init_device_mesh("cpu", (2,))
    part = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(1)]))
    for parameter in (whole, part):
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        round_stochastically(optimizer)
        parameter.grad = _like(parameter, _noise((6, 8), 1))
        optimizer.step()
    assert torch.equal(part.full_tensor(), whole)  # type: ignore[attr-defined]


def _noise(shape: tuple[int, ...] | torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def _like(parameter: Tensor, whole: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)


@pytest.mark.slow
def test_shards_round_as_the_whole_does() -> None:
    on_ranks(2, process)


def test_a_routers_correction_bias_stays_in_fp32() -> None:
    moe = MoEConfig(experts=4, experts_per_token=2, correction_bias=True, scores="sigmoid")
    model = Transformer(ModelConfig(vocab_size=20, dim=64, layers=2, heads=2, moe=moe))
    bias = torch.tensor([1.0, 1.001, 0.999, 1.002])
    with torch.no_grad():
        for block in model.blocks.values():
            block.mlp.router.correction_bias.copy_(bias)
    apply_precision(model, make_mesh(Layout(precision="bf16-pure"), "cpu"))
    dtypes = {name.endswith("correction_bias"): p.dtype for name, p in model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    torch.testing.assert_close(model.blocks["0"].mlp.router.correction_bias.detach(), bias, rtol=0, atol=0)
