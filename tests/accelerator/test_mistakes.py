"""What a user may get wrong is said in one line, with what to change, before it costs anything."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piledriver.accelerator import Accelerator
from piledriver.checkpoint.errors import CheckpointError
from piledriver.core.errors import PiledriverError
from piledriver.engine import Layout, LayoutError
from piledriver.runtime.world import group_world
from tests.checkpoint.processes import run as on_ranks
from tests.laws.test_layouts import make_model


@pytest.mark.parametrize(
    "wrong",
    [
        {"zero": 4},
        {"zero": True},
        {"precision": "int4"},
        {"activations": "some"},
        {"offload": "disk"},
        {"cp_method": "rings"},
        {"schedule": "2f2b"},
        {"compile": "all"},
        {"tp": "2"},
        {"pp": 2, "microbatches": 1.5},
        {"prefetch": -1},
        {"expert_capacity": 0.0},
    ],
    ids=str,
)
def test_a_value_that_no_layout_has_is_refused_by_its_name(wrong: dict[str, Any]) -> None:
    name, value = list(wrong.items())[-1]
    with pytest.raises(LayoutError, match=f"{name} is .*{value}.*Fix: "):
        Layout(**wrong)


@pytest.mark.parametrize("layout", [None, Layout(compile=False, offload="optimizer")], ids=["plain", "offload"])
@pytest.mark.parametrize("verb", ["save_state", "save_model"])
def test_a_folder_that_cannot_be_written_is_said_in_one_line(tmp_path: Path, layout: Layout | None, verb: str) -> None:
    accelerator = Accelerator(cpu=True, layout=layout)
    model = accelerator.prepare(nn.Linear(2, 2))
    (tmp_path / "file").touch()
    target = str(tmp_path / "file" / "folder")
    with pytest.raises(CheckpointError, match=r"cannot save to .*Fix: ") as caught:
        accelerator.save_state(target) if verb == "save_state" else accelerator.save_model(model, target)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    first = Accelerator(cpu=True)
    first.prepare(nn.Linear(4, 4))
    first.save_state(str(tmp_path / "saved"))
    second = Accelerator(cpu=True)
    model = second.prepare(nn.Linear(4, 5))
    before = model.weight.clone()
    with pytest.raises(PiledriverError, match=r"differ.*Fix: "):
        second.load_state(str(tmp_path / "saved"))
    assert torch.equal(model.weight, before)


def test_an_optimizer_that_was_not_prepared_is_missed(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, layout=Layout(compile=False, offload="optimizer"))
    model = accelerator.prepare(nn.Linear(2, 2))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 2)).sum())
    assert [record.message for record in caplog.records if "no optimizer was prepared" in record.message] != []
    assert len(caplog.records) == 1
    # On one process the parameters stay the user's: there is nothing to miss.
    caplog.clear()
    accelerator = Accelerator(cpu=True, layout=Layout(compile=False))
    accelerator.backward(accelerator.prepare(nn.Linear(2, 2))(torch.ones(1, 2)).sum())
    assert not caplog.records


def test_clipping_before_any_backward_is_a_norm_of_nothing() -> None:
    for layout in (None, Layout(compile=False, precision="fp16"), Layout(compile=False, offload="optimizer")):
        accelerator = Accelerator(cpu=True, layout=layout)
        model = nn.Linear(2, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = model.state_dict()["weight"].clone()
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 0
        optimizer.step()
        assert torch.equal(model.state_dict()["weight"], before)


@pytest.mark.slow
def test_parameters_of_no_prepared_model_are_missed_where_gradients_are_averaged() -> None:
    on_ranks(2, _with_and_without_a_stranger)


def _with_and_without_a_stranger(_rank: int) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("piledriver.accelerator.gradients").addHandler(handler)
    for layout in (None, Layout(zero=1), Layout(zero=3), Layout(tp=2)):
        for stranger in ([], [nn.Parameter(torch.ones(3))]):
            accelerator = Accelerator(world=group_world(), layout=layout)
            model = make_model("transformer")
            optimizer = torch.optim.SGD([*model.parameters(), *stranger], lr=0.1)
            model, optimizer = accelerator.prepare(model, optimizer)
            tokens = torch.arange(34).view(2, 17)
            sums = model(tokens[:, :-1], tokens[:, 1:])
            said.clear()
            accelerator.backward(sums.total / sums.tokens)
            expected = bool(stranger) and (layout is None or layout.zero != 3)
            assert ["of no prepared model" in one for one in said] == [True] * expected, (layout, stranger, said)
