"""A step that the device leaves out is a step that was never taken: weights, states, counters and later noise."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from piledriver.optim import OptimizerConfig, build_optimizer, can_skip_on_device, step_unless
from piledriver.optim.adamw import step_constants

from .problems import Net

CPU = torch.device("cpu")
KINDS = ["adamw", "muon", "lion", "adamw8bit", "adamw_bf16", "adamw_split", "adamw_split_bf16"]


def give_gradients(model: nn.Module, step: int, *, broken: bool = False) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        if broken:
            parameter.grad.fill_(float("nan"))


# bf16 weights need an optimizer that keeps or rounds their other half.
CASES = [*((kind, torch.float32) for kind in KINDS), *((kind, torch.bfloat16) for kind in KINDS[3:])]


GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_left_out_is_never_taken(kind: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that the facts made ahead run out within the test.
    monkeypatch.setattr(step_constants, "LOOKAHEAD_STEPS", 3)
    config = OptimizerConfig(kind=kind, lr=0.01)  # type: ignore[arg-type]
    never, told = Net().to(device, dtype), Net().to(device, dtype)
    plain, optimizer = build_optimizer(never, config), build_optimizer(told, config)
    assert can_skip_on_device(optimizer, next(told.parameters()).device)
    for step in range(12):
        left_out = step in (0, 3, 4, 9)
        give_gradients(told, step, broken=left_out)
        if step == 6:
            optimizer.step()  # the host counts again for a while
        else:
            step_unless(torch.tensor(left_out, device=device), optimizer)
        if not left_out:
            give_gradients(never, step)
            plain.step()
        if step == 7:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = build_optimizer(told, config)
            optimizer.load_state_dict(saved)
    for expected, found in zip(never.parameters(), told.parameters(), strict=True):
        if device == "cuda" and kind in ("muon", "adamw8bit", "adamw_bf16"):
            # Other graphs and batches of matrices round in another order.
            torch.testing.assert_close(expected, found, rtol=0.02, atol=1e-3)
            continue
        assert torch.equal(expected, found)
        for key, value in plain.state[expected].items():
            assert torch.equal(value.cpu(), optimizer.state[found][key].cpu()), key


def test_counters_that_others_wrote_are_read_again() -> None:
    model = Net()
    optimizer = build_optimizer(model, OptimizerConfig(kind="adamw_split_bf16"))
    states: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        for step in range(3):
            give_gradients(model, step)
            step_unless(torch.tensor(False), optimizer)
        states.append({key: value.clone() for key, value in optimizer.state[model.up.weight].items()})
        with torch.no_grad():
            for parameter in model.parameters():
                for value in optimizer.state[parameter].values():
                    value.zero_()
    assert all(torch.equal(states[0][key], states[1][key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_who_has_to_be_waited_for() -> None:
    model = Net()
    assert not can_skip_on_device(torch.optim.SGD(model.parameters(), lr=0.1), CPU)
    assert not can_skip_on_device(torch.optim.AdamW(model.parameters(), fused=True), torch.device("cuda"))
