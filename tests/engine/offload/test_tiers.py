"""Masters, states, gradients and weights in any tier train bit for bit as `offload="optimizer"` does."""

from __future__ import annotations

import copy
import gc
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piledriver.core.config import from_mapping, to_mapping
from piledriver.engine.errors import EngineError, LayoutError
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.offload import apply_offload, offloaded, undo_offload
from piledriver.engine.offload.apply import offload_optimizer
from piledriver.engine.offload.disk.direct_io import DiskRate
from piledriver.engine.offload.disk.errors import DiskFullError
from piledriver.engine.optimizer.global_norm import clip_sharded_grad_norm
from piledriver.engine.optimizer.loss_scale import LossScale, LossScaler
from piledriver.engine.precision import apply_precision
from piledriver.engine.tiers import Offload
from piledriver.models import ModelConfig, Transformer
from piledriver.optim import CompactAdamW

CPU = torch.device("cpu")
TOKENS = torch.randint(300, (4, 4, 9), generator=torch.Generator().manual_seed(0))
Run = tuple[nn.Module, torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def compact(parameters: Any) -> torch.optim.Optimizer:
    return CompactAdamW(parameters, lr=1e-2, states="int8")


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-1, momentum=0.9)


def make(offload: Any, optimizer: Callable[[Any], torch.optim.Optimizer] = adamw, **options: Any) -> Run:
    layout = Layout(offload=offload, **options)
    torch.manual_seed(0)
    # The embedding has 19,200 elements: several pieces of the smallest buffer.
    model = Transformer(ModelConfig(vocab_size=300, dim=64, layers=2, heads=2, tied=True))
    made = optimizer(model.parameters())
    apply_precision(model, make_mesh(layout, "cpu"))
    apply_offload(model, make_mesh(layout, "cpu"), CPU)
    if layout.offloads:
        offload_optimizer(made)
    return model, made


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    sums = model(tokens[:, :-1], targets=tokens[:, 1:])
    found: Tensor = sums.total / sums.tokens
    return found


def train(run: Run, steps: range = range(3), *, clip: float | None = 0.5, parts: int = 2) -> list[float]:
    model, optimizer = run
    seen = []
    for step in steps:
        for tokens in TOKENS[step].chunk(parts):
            loss = loss_of(model, tokens) / parts
            loss.backward()
        if clip is not None:
            seen.append(float(clip_sharded_grad_norm(list(model.parameters()), clip)))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def assert_same(ours: Run, theirs: Run) -> None:
    """The weights and the optimizer states of two runs are equal, bit for bit."""
    expected = theirs[0].state_dict()
    for name, value in ours[0].state_dict().items():
        assert torch.equal(value, expected[name]), name
    states = theirs[1].state_dict()["state"]
    for number, state in ours[1].state_dict()["state"].items():
        assert state.keys() == states[number].keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[number][key])), (number, key)


def on_disk(folder: Path, **options: Any) -> Offload:
    return Offload(**{"optimizer": "disk", "folder": str(folder), "buffer_bytes": 1 << 16, **options})


TIERS: dict[str, dict[str, Any]] = {
    "disk": {},
    "one buffer": {"buffers": 1},
    "split": {"optimizer_share": 0.5},
    "gradients": {"gradients": "disk"},
    "gradients alone": {"optimizer": "host", "gradients": "disk"},
    "parameters": {"parameters": "disk"},
    "parameters split": {"parameters": "disk", "parameters_share": 0.5, "optimizer_share": 0.7},
    "parameters alone": {"optimizer": "host", "parameters": "disk"},
}


@pytest.mark.parametrize(
    ("tiers", "precision"), [(name, "fp32") for name in TIERS] + [("split", "bf16"), ("parameters split", "bf16")]
)
def test_any_tier_is_bit_equal_to_host_memory(tmp_path: Path, tiers: str, precision: Any) -> None:
    ours = make(on_disk(tmp_path, **TIERS[tiers]), precision=precision)
    theirs = make("optimizer", precision=precision)
    assert train(ours) == train(theirs)
    assert_same(ours, theirs)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("optimizer", [compact, momentum])
@pytest.mark.parametrize("tiers", ["disk", "split"])
def test_other_optimizers(tmp_path: Path, optimizer: Any, tiers: str) -> None:
    ours, theirs = make(on_disk(tmp_path, **TIERS[tiers]), optimizer), make("optimizer", optimizer)
    assert train(ours) == train(theirs)
    assert_same(ours, theirs)


def test_part_of_the_states_may_stay_on_the_device() -> None:
    ours, theirs = make(Offload(optimizer_share=0.5)), make("optimizer")
    assert train(ours) == train(theirs)
    masters = sum(hasattr(p, "master_weight") for group in ours[1].param_groups for p in group["params"])
    assert 0 < masters < len(list(ours[0].parameters()))
    with pytest.raises(LayoutError, match="updates all parameters together"):
        make(Offload(gradients="step"), torch.optim.LBFGS)


@pytest.mark.parametrize("options", [{"optimizer": "host"}, {}, {"parameters": "disk"}])
def test_blocks_that_step_in_the_backward(tmp_path: Path, options: dict[str, Any]) -> None:
    ours = make(on_disk(tmp_path, gradients="step", **options))
    theirs = make("optimizer")
    most = []
    masters = list(offloaded(ours[0]).masters.values())
    total = sum(master.part.nbytes for master in masters)
    original = type(masters[0]).add_gradient

    def add(master: Any, came: Tensor) -> None:
        original(master, came)
        most.append(sum(one.part.nbytes for one in masters if one.gradient is not None))

    type(masters[0]).add_gradient = add  # type: ignore[method-assign]
    try:
        assert train(ours, clip=None, parts=1) == train(theirs, clip=None, parts=1)
    finally:
        type(masters[0]).add_gradient = original  # type: ignore[method-assign]
    assert_same(ours, theirs)
    assert max(most) < 0.7 * total
    assert all(master.gradient is None for master in masters)


def test_clipping_while_blocks_step_in_the_backward_takes_two_passes(tmp_path: Path) -> None:
    ours, theirs = make(on_disk(tmp_path, gradients="step")), make("optimizer")
    dropout = nn.Dropout(0.1)
    norms: list[float] = []
    for run in (ours, theirs):
        torch.manual_seed(1)
        model, optimizer = run
        found = []
        for step in range(3):

            def closure(step: int = step, run: Run = run, found: list[float] = found) -> Tensor:
                run[1].zero_grad()
                loss = loss_of(run[0], TOKENS[step]) * dropout(torch.ones(20)).mean()
                loss.backward()
                found.append(float(clip_sharded_grad_norm(list(run[0].parameters()), 0.5)))
                return loss

            found.append(optimizer.step(closure).item())  # type: ignore[attr-defined]
        norms.append([*found[1:3], *found[4:6], *found[7:]] if run is ours else found)  # type: ignore[arg-type]
    assert norms[0] == norms[1]
    assert_same(ours, theirs)

    model, optimizer = ours
    loss_of(model, TOKENS[0]).backward()
    with pytest.raises(EngineError, match="two passes"):
        clip_sharded_grad_norm(list(model.parameters()), 0.5)
    with pytest.raises(EngineError, match="second backward"):
        loss_of(model, TOKENS[0]).backward()


def test_scaled_gradients_on_disk_are_unscaled(tmp_path: Path) -> None:
    ours, theirs = make(on_disk(tmp_path, gradients="disk")), make("optimizer")
    for model, optimizer in (ours, theirs):
        scaler = LossScaler(LossScale(initial=8.0))
        for step in range(3):
            factor = float("inf") if step == 1 else 1.0
            scaler.scale(loss_of(model, TOKENS[step]) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.skipped == 1
    assert_same(ours, theirs)


@pytest.mark.parametrize("optimizer", [adamw, compact])
def test_states_that_were_loaded_into_memory_move_to_their_tier(tmp_path: Path, optimizer: Any) -> None:
    theirs = make("optimizer", optimizer)
    train(theirs, range(2))
    saved = copy.deepcopy([thing.state_dict() for thing in theirs])
    ours = make(on_disk(tmp_path), optimizer)
    for thing, state in zip(ours, saved, strict=True):
        thing.load_state_dict(state)
    assert train(ours, range(2, 4)) == train(theirs, range(2, 4))
    assert_same(ours, theirs)
    store = offloaded(ours[0]).store
    held = [v for state in ours[1].state.values() for v in state.values() if v.dim() > 1]
    assert len(held) >= 18
    assert all(store.find(value) is not None for value in held)


@pytest.mark.parametrize("options", [{}, {"parameters": "disk", "gradients": "step"}])
def test_weights_come_back_and_a_model_that_is_gone_leaves_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    model, optimizer = make(on_disk(tmp_path, **options))
    train((model, optimizer), range(1), clip=None, parts=1)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    held = [weakref.ref(parameter) for parameter in model.parameters()]
    held += [weakref.ref(master) for group in optimizer.param_groups for master in group["params"]]
    undo_offload(model)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert loss_of(model, TOKENS[0]).isfinite()
    del model, optimizer
    gc.collect()
    assert sum(one() is not None for one in held) == 0


@pytest.mark.parametrize(
    ("bytes_each", "options"),
    [(12, {}), (16, {"gradients": "disk"}), (18, {"gradients": "disk", "parameters": "disk", "precision": "bf16"})],
)
def test_files_are_reserved_whole_before_the_first_step(
    tmp_path: Path, bytes_each: int, options: dict[str, Any]
) -> None:
    precision = options.pop("precision", "fp32")
    run = make(on_disk(tmp_path, **options), precision=precision)
    store = offloaded(run[0]).store
    before = store.nbytes
    train(run, range(2))
    assert store.nbytes == before
    matrices = [one.master_weight.part.numel() for one in run[1].param_groups[0]["params"] if one.dim() > 1]
    # Each tensor ends within a page, and states begin at one.
    assert before <= bytes_each * sum(matrices) + len(matrices) * (4 * 4096 * 4 + 4 * 4096)


def test_a_full_disk_is_found_before_the_first_step(tmp_path: Path) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for the masters (4 bytes a parameter), not for the states (8).
    resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, limits[1]))
    try:
        with pytest.raises(DiskFullError, match="are needed"):
            make(on_disk(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


def test_a_slow_disk_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make(on_disk(tmp_path))
    offloaded(run[0]).store.expected = DiskRate(read=1e15, write=1e15)
    with caplog.at_level(logging.WARNING):
        train(run, range(1))
    assert "when it was opened" in caplog.text


def test_a_layout_prints_and_saves_its_tiers(tmp_path: Path) -> None:
    layout = Layout(zero=3, offload=Offload(optimizer="disk", optimizer_share=0.4, folder="/nvme"))
    assert repr(layout) == "Layout(zero=3, offload=Offload(optimizer='disk', optimizer_share=0.4, folder='/nvme'))"
    assert from_mapping(Layout, to_mapping(layout)) == layout
    assert from_mapping(Layout, {"offload": "optimizer"}) == Layout(offload="optimizer")
    assert Layout(offload="parameters").tiers == Offload(parameters="host")
    for wrong in ({"optimizer": "disk"}, {"optimizer": "nvme"}, {"optimizer_share": 0.0}, {"buffers": 0}):
        with pytest.raises(LayoutError):
            Offload(**wrong)  # type: ignore[arg-type]
    with pytest.raises(LayoutError):
        Offload(optimizer="device", gradients="step")
    with pytest.raises(LayoutError, match="fp16"):
        Layout(precision="fp16", offload=Offload(gradients="step"))
    for options in ({"zero": 0}, {"zero": 1, "offload": Offload(gradients="step")}):
        with pytest.raises(LayoutError):
            Layout(**{"offload": "optimizer", **options}).on(2)
    assert Layout(pp=2, offload="optimizer").on(2).offloads
    for options in ({"offload": "parameters"}, {"offload": Offload(gradients="step")}, {"schedule": "zbv"}):
        with pytest.raises(LayoutError, match=r"offload .* with "):
            Layout(**{"pp": 2, "offload": "optimizer", **options})
