"""Each optimizer equals its reference, learns, and continues from its saved state as if it had never stopped."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from piledriver.core.errors import UsageError
from piledriver.kernels.newton_schulz import orthogonalise
from piledriver.optim import CompactAdamW, Lion, Muon, OptimizerConfig, build_optimizer, parameter_groups
from tests.optim.problems import Net, train

KINDS = {"adamw": 0.01, "muon": 0.01, "lion": 0.002, "adamw8bit": 0.01, "adamw_bf16": 0.01}


def made(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(model, OptimizerConfig(kind=kind, lr=KINDS[kind]))  # type: ignore[arg-type]


def same(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y), name


# Fewer steps in bf16, which a CPU without such units computes slowly.
@pytest.mark.parametrize(("dtype", "steps", "end"), [(torch.float32, 80, 0.3), (torch.bfloat16, 40, 1.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_learns(kind: str, dtype: torch.dtype, steps: int, end: float) -> None:
    model = Net().to(dtype)
    losses = train(model, made(kind, model), steps)
    assert losses[0] > 2.5
    assert losses[-1] < end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_continues_from_its_state(kind: str, dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    optimizer = made(kind, model)
    train(model, optimizer, 5)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    train(model, optimizer, 5, first=5)

    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other = Net(seed=1).to(dtype)
    other.load_state_dict(weights)
    resumed = made(kind, other)
    resumed.load_state_dict(state)
    for before, after in zip(state["state"].values(), resumed.state_dict()["state"].values(), strict=True):
        assert {name: value.dtype for name, value in before.items()} == {
            name: value.dtype for name, value in after.items()
        }
    train(other, resumed, 5, first=5)
    same(model, other)


def test_adamw_is_fused_and_equal_to_torch() -> None:
    ours, theirs = Net(), Net()
    optimizer = build_optimizer(ours, OptimizerConfig(lr=0.01))
    assert optimizer.defaults["fused"]
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    vectors = [p for p in theirs.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    train(ours, optimizer, 10)
    train(theirs, torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True), 10)
    same(ours, theirs)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_torchs_muon_and_adamw(nesterov: bool, adjust: str) -> None:
    ours, theirs = Net(), Net()
    groups = parameter_groups(ours, lr=0.01)
    # torch iterates in bf16, which a CPU without such units computes slowly: few steps.
    optimizer = Muon(groups, 0.01, nesterov=nesterov, adjust=adjust, dtype=torch.bfloat16)  # type: ignore[arg-type]
    train(ours, optimizer, 3)

    hidden = [theirs.up.weight, theirs.down.weight]
    muon = torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn=adjust)
    vectors = [p for p in theirs.parameters() if p.dim() < 2]
    rest = [{"params": vectors, "weight_decay": 0.0}, {"params": [theirs.embedding.weight, theirs.head.weight]}]
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    class Both(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(theirs.parameters(), {})

        def step(self, closure: object = None) -> None:
            muon.step()
            adamw.step()

    train(theirs, Both(), 3)
    for (name, x), y in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(x, y[1], msg=name, atol=1e-6, rtol=1e-5)


def test_orthogonalise_flattens_the_singular_values() -> None:
    torch.manual_seed(0)
    for shape in ((48, 32), (32, 48), (3, 32, 48)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
        assert values.min() > 0.4
        assert values.max() < 1.6


def test_stacked_experts_are_separate_matrices() -> None:
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, 8, 16))
    single = [nn.Parameter(part.clone()) for part in stack.detach()]
    stack.grad = torch.randn_like(stack)
    for part, gradient in zip(single, stack.grad, strict=True):
        part.grad = gradient.clone()
    Muon([stack], 0.1).step()
    Muon(single, 0.1).step()
    torch.testing.assert_close(stack.detach(), torch.stack([part.detach() for part in single]), atol=1e-2, rtol=1e-2)


def test_muon_refuses_vectors() -> None:
    with pytest.raises(UsageError, match=r"shape \(4,\)"):
        Muon([nn.Parameter(torch.zeros(4))])


def test_lion_is_its_formula() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, 3))
    optimizer = Lion([parameter], 0.01, betas=(0.9, 0.99), weight_decay=0.3)
    weight, momentum = parameter.detach().clone(), torch.zeros(5, 3)
    for _ in range(5):
        gradient = torch.randn(5, 3)
        parameter.grad = gradient.clone()
        optimizer.step()
        weight = weight - 0.01 * ((0.9 * momentum + 0.1 * gradient).sign() + 0.3 * weight)
        momentum = 0.99 * momentum + 0.01 * gradient
    torch.testing.assert_close(parameter.detach(), weight)


def test_compact_adamw_with_fp32_states_is_adamw() -> None:
    ours, theirs = Net(), Net()
    train(ours, CompactAdamW(parameter_groups(ours, lr=0.01), states="fp32"), 20)
    train(theirs, build_optimizer(theirs, OptimizerConfig(lr=0.01)), 20)
    for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("states", ["int8", "bf16"])
def test_small_states_converge_as_adamw_does(states: str) -> None:
    reference, model = Net(), Net()
    expected = train(reference, build_optimizer(reference, OptimizerConfig(lr=0.003)), 100)
    found = train(model, CompactAdamW(parameter_groups(model, lr=0.003), states=states), 100)  # type: ignore[arg-type]
    for a, b in zip(found[::10], expected[::10], strict=True):
        assert a == pytest.approx(b, rel=0.15, abs=0.05)


def test_pure_bf16_weights_follow_the_fp32_run() -> None:
    """Rounded to nearest, an update below half a bf16 step is lost; rounded stochastically it counts on average."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = CompactAdamW([weight], 1e-4, weight_decay=0.0, states="bf16")
    for _ in range(50):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.float().mean().item() == pytest.approx(1.0 - 50 * 1e-4, abs=5e-4)


def test_8_bit_states_take_a_quarter_of_fp32() -> None:
    def size(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
        return sum(value.nbytes for name, value in optimizer.state[parameter].items() if name != "step")

    weight = nn.Parameter(torch.randn(256, 256))
    weight.grad = torch.randn(256, 256)
    small, large = CompactAdamW([weight]), torch.optim.AdamW([copy.deepcopy(weight)])
    small.step()
    assert size(small, weight) == 2 * (256 * 256 + 256 * 4)
    large.param_groups[0]["params"][0].grad = weight.grad
    large.step()
    assert size(large, large.param_groups[0]["params"][0]) / size(small, weight) > 3.9


def test_one_graph_serves_every_shape() -> None:
    from piledriver.optim.adamw.compact import adam_step

    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(adam_step, dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (4, 8, 12):
        results = []
        for update in (adam_step, compiled):
            torch.manual_seed(rows)
            weight, gradient = torch.randn(rows, 64).bfloat16(), torch.randn(rows, 64)
            moments = {
                "exp_avg": torch.randint(256, (rows, 64), dtype=torch.uint8),
                "exp_avg_sq": torch.randint(256, (rows, 64), dtype=torch.uint8),
                "exp_avg_scale": torch.rand(rows, 1),
                "exp_avg_sq_scale": torch.rand(rows, 1),
            }
            rates = tuple(torch.tensor(value) for value in (0.1, 0.99, 0.5, 0.5))
            update(weight, gradient, moments, rates, (0.9, 0.95, 1e-8), torch.tensor(5), 640 * rows)
            results.append([weight, *moments.values()])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()


def test_groups_follow_roles() -> None:
    model = Net()
    model.up.weight.requires_grad_(False)
    groups = parameter_groups(
        model, lr=1.0, weight_decay=0.2, embedding_weight_decay=0.0, lr_scales={"down.weight": 0.25}
    )
    found = {(group["kind"], group["lr"], group["weight_decay"]): len(group["params"]) for group in groups}
    assert found == {
        ("embedding", 1.0, 0.0): 1,
        ("vector", 1.0, 0.0): 4,
        ("matrix", 0.25, 0.2): 1,
        ("output", 1.0, 0.2): 1,
    }
