"""No step waits for the device: nothing is read inside one, and the figures of a step are read when the next is given.

Where there is a GPU torch reports the waits. On a CPU every read of a number counts as one; the model's own forward is
left out there: its loss looks at numbers where they are on a CPU, and only there.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from piledriver.engine import Layout
from piledriver.models import ModelConfig
from piledriver.optim import OptimizerConfig
from piledriver.train import DataConfig, SpikeConfig, TrainConfig
from piledriver.train.deferred import DeferredScalars
from piledriver.train.loop import Trainer
from piledriver.train.reporting.metrics import read_metrics
from piledriver.train.step import PendingStep, StopSaveVote

READERS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "cpu")
WAITING_OPERATORS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from .corpus import make_tokens  # needs zstandard, which an image for GPUs may lack

    return make_tokens(tmp_path_factory.mktemp("tokens"), documents=60)


class NothingIsRead(TorchDispatchMode):
    """Fails where a number of a tensor becomes one of Python's, in this thread."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.patch, self.thread, self.in_forward = pytest.MonkeyPatch(), threading.get_ident(), False
        self.hooks = [
            model.register_forward_pre_hook(lambda *_: setattr(self, "in_forward", True)),
            model.register_forward_hook(lambda *_: setattr(self, "in_forward", False)),
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert self.in_forward or func.overloadpacket.__name__ not in WAITING_OPERATORS, func
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        for name in READERS:
            self.patch.setattr(Tensor, name, self._refusing(name, getattr(Tensor, name)), raising=False)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.patch.undo()
        for hook in self.hooks:
            hook.remove()
        super().__exit__(*error)

    def _refusing(self, name: str, plain: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            assert self.in_forward or threading.get_ident() != self.thread, f"Tensor.{name} within a step"
            return plain(tensor, *args, **kwargs)

        return read


class Watched(Trainer):
    """Steps after the first within `NothingIsRead`; notes what comes after what."""

    happened: list[str]

    def _step(self, step: int, vote: StopSaveVote) -> PendingStep:
        self.happened.append(f"step {step}")
        if step == 0:  # states are made, and counters that the host had are read
            return super()._step(step, vote)
        if self.components.device.type == "cuda":  # torch itself says where the host would wait
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            try:
                return super()._step(step, vote)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        with NothingIsRead(self.model):
            return super()._step(step, vote)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    ("kind", "layout", "action"),
    [
        ("adamw", None, "skip"),
        ("adamw", None, "log"),
        ("muon", None, "skip"),
        ("adamw8bit", None, "skip"),
        ("adamw_split_bf16", Layout(precision="bf16-pure"), "skip"),
    ],
)
def test_a_step_is_handed_over_without_reading_anything(
    tokens: Path, tmp_path: Path, kind: Any, layout: Layout | None, action: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(
        model=ModelConfig(vocab_size=512, dim=64, layers=1, heads=2, max_positions=32),
        data=DataConfig(tokens=str(tokens)),
        batch_tokens=128,
        micro_batch_tokens=64,
        budget_tokens=128 * 12,
        checkpoint_steps=8,
        out=str(tmp_path / "run"),
        optimizer=OptimizerConfig(kind=kind, lr=1e-5),
        layout=replace(layout or Layout(), compile=False),
        trackers=(),
        plots=False,
        # A model that hardly learns, and so small a limit that some steps are spikes.
        spikes=SpikeConfig(action=action, factor=1e-9, warmup_steps=2),
    )
    run = Watched(config)
    run.happened = []
    read = DeferredScalars.read

    def noted(reading: DeferredScalars) -> list[float]:
        run.happened.append("read")
        return read(reading)

    monkeypatch.setattr(DeferredScalars, "read", noted)
    summary = run.run()
    # Before the checkpoint after step 7, and at the end, everything is read that was not yet.
    steps = [f"step {step}" for step in range(12)]
    between = [[] if step in (0, 8) else ["read"] for step in range(12)]
    between[7], between[11] = ["read", "read"], ["read", "read"]
    assert run.happened == [event for step, after in zip(steps, between, strict=True) for event in (step, *after)]
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 13))
    spikes = int(run.train_step.watch.count)
    assert spikes > 0
    assert sum(row["skipped"] for row in rows) == summary.skipped_batches == (spikes if action == "skip" else 0)
    assert rows[-1]["skipped_batches"] == summary.skipped_batches


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_the_time_between_two_steps_is_that_of_the_device_however_late_the_host_reads(device: str) -> None:
    first = DeferredScalars(torch.ones(1, device=device))
    if device == "cuda":
        torch.cuda._sleep(10**8)
    else:
        time.sleep(0.03)
    second = DeferredScalars(torch.ones(1, device=device))
    if device == "cuda":
        torch.cuda.synchronize()
    first.read()
    second.read()
    assert second.seconds_since(first) >= 0.03
