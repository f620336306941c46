"""What is gone leaves nothing: no tensor, no thread, no open file, no hook on a model that its user keeps.

Hooks that torch holds in C++ are out of the collector's sight: one of them that holds a model keeps it for ever.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from piledriver.accelerator import Accelerator
from piledriver.engine import Layout
from piledriver.models.loss import LossSums
from piledriver.observe.monitor import SystemMonitor
from piledriver.observe.trackers.jsonl import read_jsonl
from piledriver.runtime.world import group_world
from tests.checkpoint.processes import run as on_ranks
from tests.laws.test_layouts import VOCAB, make_model
from tests.patience import HANG_S


class WithStatistics(nn.Module):
    """A model that keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> LossSums:
        y = self.norm(self.linear(tokens.float()))
        return LossSums(y.pow(3).sum(), *[torch.tensor(float(y.numel()))] * 4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train, and the kinds of hooks that stay on its model because its parameters stay in pieces."""

    name: str
    layout: Layout | None
    model: str = "transformer"
    stay: frozenset[str] = field(default=frozenset())


SHARDED = frozenset({"FSDPState", "FSDPParamGroup", "<lambda>", "_reset_if_broken"})


ALONE = [
    Case(name="plain", layout=None),
    Case(name="keep", layout=Layout(compile=False)),
    Case(name="full", layout=Layout(compile=False, activations="full", activation_offload=True)),
    Case(name="budget", layout=Layout(compile=False, activations="budget")),
    Case(name="fp16", layout=Layout(compile=False, precision="fp16")),
    Case(name="fp8-pure", layout=Layout(compile=False, precision="fp8-pure")),
    Case(name="offload-optimizer", layout=Layout(compile=False, offload="optimizer", precision="bf16")),
    Case(name="offload-parameters", layout=Layout(compile=False, offload="parameters")),
]

TWO = [
    Case(name="ddp", layout=None),
    Case(name="ddp-statistics", layout=None, model="statistics"),
    Case(name="zero0-statistics", layout=Layout(), model="statistics"),
    Case(name="zero1-fp16", layout=Layout(zero=1, precision="fp16")),
    Case(name="zero2-statistics", layout=Layout(zero=2), model="statistics"),
    Case(name="zero3", layout=Layout(zero=3, debug=True), stay=SHARDED),
    Case(name="zero3-offload", layout=Layout(zero=3, offload="optimizer"), stay=SHARDED),
    Case(name="tp", layout=Layout(tp=2), stay=frozenset({"_begin", "_end", "<lambda>", "VocabParallelEmbedding"})),
    Case(name="pp", layout=Layout(pp=2, microbatches=2), model="tied"),
    Case(name="cp", layout=Layout(cp=2), stay=frozenset({"<lambda>"})),
    Case(name="ep", layout=Layout(ep=2), model="moe", stay=frozenset({"_begin", "_end"})),
]


def prepared(case: Case) -> tuple[Accelerator, nn.Module, Any, Any]:
    world = group_world() if dist.is_initialized() else None
    accelerator = Accelerator(cpu=world is None, world=world, layout=case.layout)
    model = WithStatistics() if case.model == "statistics" else make_model(case.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(2):
        tokens = torch.randint(VOCAB, (4, 17))
        with accelerator.accumulate(model):
            sums = model(tokens[:, :-1], tokens[:, 1:])
            accelerator.backward(sums.total / sums.tokens)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return accelerator, model, optimizer, scheduler


def watched(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> dict[str, weakref.ref[Any]]:
    """Everything that has to go."""
    found: dict[str, Any] = {"accelerator": accelerator, "model": model, "optimizer": optimizer.optimizer}
    found |= {f"parameter {name}": parameter for name, parameter in model.named_parameters()}
    for number, (stepped_on, state) in enumerate(optimizer.state.items()):
        found[f"stepped on {number}"] = stepped_on
        found |= {f"state {number} {key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: weakref.ref(thing) for name, thing in found.items()}


def hooks_of(model: nn.Module) -> set[str]:
    """The kinds of hooks on a model, and what else was put there that acts."""
    kinds: set[str] = set()
    for module in model.modules():
        for name, table in vars(module).items():
            if name.endswith("_hooks") and isinstance(table, dict):
                kinds |= {_kind(getattr(hook, "hook", hook)) for hook in table.values()}
        kinds |= {"zero_grad", "_offloaded"} & vars(module).keys()
    for parameter in model.parameters():
        kinds |= {"optimizer_shard", "on_host"} & vars(parameter).keys()
        if parameter._post_accumulate_grad_hooks or parameter._backward_hooks:
            kinds.add("gradient")
    return kinds


def _kind(hook: Any) -> str:
    parts = getattr(hook, "__qualname__", type(hook).__qualname__).split(".")
    return parts[-1] if parts[-1] == "<lambda>" else parts[0]


def belongings() -> tuple[set[threading.Thread], int]:
    """Threads and open files of this process."""
    return set(threading.enumerate()), len(os.listdir("/proc/self/fd"))


def assert_gone(things: dict[str, weakref.ref[Any]], before: Any) -> None:
    gc.collect()
    assert [name for name, thing in things.items() if thing() is not None] == []
    for thread in set(threading.enumerate()) - before[0]:
        # It was told to end, and does so when it comes to it.
        thread.join(HANG_S)
    threads, files = belongings()
    assert threads <= before[0]
    assert files <= before[1]


def check(case: Case) -> None:
    # Once for what is made once a process: mesh of this layout with their connections, caches.
    before = belongings()
    prepared(case)
    gc.collect()
    before = before[0], belongings()[1]

    accelerator, model, optimizer, scheduler = prepared(case)
    things = watched(accelerator, model, optimizer)
    del accelerator, model, optimizer, scheduler
    assert_gone(things, before)

    accelerator, model, optimizer, scheduler = prepared(case)
    things = watched(accelerator, model, optimizer)
    del things["accelerator"]
    model, optimizer, scheduler = accelerator.free_memory(model, optimizer, scheduler)
    assert_gone(things, before)

    accelerator, model, optimizer, scheduler = prepared(case)
    things = watched(accelerator, model, optimizer)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = {id(parameter) for parameter in model.parameters()} | {id(model)}
    things = {name: thing for name, thing in things.items() if id(thing()) not in kept}
    accelerator.free_memory()
    del accelerator, optimizer, scheduler
    assert_gone(things, before)
    assert hooks_of(model) - case.stay == set(), hooks_of(model)
    # It is whole: no weight is left elsewhere.
    for name, tensor in model.state_dict().items():
        assert torch.equal(_here(tensor), _here(weights[name])), name


def _here(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_what_is_gone_leaves_nothing(case: Case) -> None:
    check(case)


def test_trackers_and_monitors_that_nobody_ends_leave_nothing(tmp_path: Path) -> None:
    before = belongings()
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=str(tmp_path))
    accelerator.init_trackers("run", {})
    accelerator.log({"loss": 1.0}, step=0)
    monitor = SystemMonitor(every_s=60, sink=accelerator.log).start()
    things = {"accelerator": weakref.ref(accelerator), "monitor": weakref.ref(monitor)}
    del accelerator, monitor
    assert_gone(things, before)
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 1


def test_a_save_in_the_background_leaves_no_copy_of_what_it_saved(tmp_path: Path) -> None:
    # What the first save of a process opens for good does not count.
    accelerator, *things = prepared(ALONE[0])
    accelerator.save_state(str(tmp_path / "first"), asynchronous=True)
    accelerator.free_memory(*things)
    del accelerator, things
    gc.collect()
    before = belongings()
    accelerator, model, optimizer, scheduler = prepared(ALONE[0])
    accelerator.save_state(str(tmp_path / "saved"), asynchronous=True)
    accelerator._saver.checkpointer.wait()
    copies = [weakref.ref(copy) for copy in accelerator._saver.checkpointer._staging._buffers.values()]
    things = watched(accelerator, model, optimizer) | {f"copy {number}": copy for number, copy in enumerate(copies)}
    del things["accelerator"]
    model, optimizer, scheduler = accelerator.free_memory(model, optimizer, scheduler)
    assert copies
    assert_gone(things, before)


@pytest.mark.slow
def test_what_is_gone_leaves_nothing_on_two(tmp_path: Path) -> None:
    on_ranks(2, _check_all, str(tmp_path / "saved"))


def _saved(folder: str) -> None:
    accelerator, *_ = prepared(TWO[0])
    accelerator.save_state(folder)
    accelerator.free_memory()


def _check_all(_rank: int, folder: str) -> None:
    _saved(folder)
    gc.collect()
    before = belongings()
    _saved(folder)
    assert_gone({}, before)
    for case in TWO:
        try:
            check(case)
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from error
