"""The facade on one process: nothing around the model, exact means, one scheduler step per step, clear refusals."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from piledriver.accelerator import (
    Accelerator,
    AutocastKwargs,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    find_executable_batch_size,
)
from piledriver.accelerator.errors import NotPreparedError, OptionError, PrecisionError, PreparedTwiceError
from piledriver.accelerator.options.handlers import KwargsHandler
from piledriver.engine.optimizer.global_norm import clip_sharded_grad_norm, total_norm
from piledriver.engine.shards.tied_parameters import find_tied, retie


def _parts(samples: int = 24, batch: int = 4) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(samples, 3), torch.randn(samples, 1))
    return (
        model,
        optimizer,
        DataLoader(data, batch_size=batch),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    )


def test_nothing_is_put_around_the_model() -> None:
    model, *_ = _parts()
    keys, kind = list(model.state_dict()), type(model)
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert prepared is model
    assert type(prepared) is kind
    assert list(prepared.state_dict()) == keys
    assert prepared(torch.randn(2, 3)).dtype is torch.float32


def test_a_prepared_model_can_be_copied_and_unwrapped_and_pickled() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(_parts()[0])
    x = torch.randn(2, 3)
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    torch.testing.assert_close(pickle.loads(pickle.dumps(bare))(x), bare(x))


def test_the_order_of_prepare_is_kept_and_unknown_things_pass_through() -> None:
    model, optimizer, loader, scheduler = _parts()
    ready = Accelerator(cpu=True).prepare(scheduler, "text", loader, model, None, optimizer)
    assert ready[1] == "text"
    assert ready[4] is None
    assert ready[0].scheduler is scheduler
    assert ready[5].optimizer is optimizer
    assert ready[0].optimizers == [ready[5]]


def test_preparing_again() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = _parts()
    ready = accelerator.prepare(model, optimizer, loader, scheduler)
    assert all(a is b for a, b in zip(accelerator.prepare(*ready), ready, strict=True))
    with pytest.raises(PreparedTwiceError, match="SGD is prepared already"):
        accelerator.prepare(optimizer)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
@settings(max_examples=25)
def test_counted_windows_are_the_mean_over_all_items(lengths: list[int]) -> None:
    torch.manual_seed(0)
    items = [torch.randn(length, 3) for length in lengths]
    reference, model = nn.Linear(3, 1), nn.Linear(3, 1)
    model.load_state_dict(reference.state_dict())
    reference(torch.cat(items)).square().mean().backward()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(lengths))
    model = accelerator.prepare(model)
    for index, batch in enumerate(items):
        count = len(batch) if index % 2 else torch.tensor(len(batch))
        with accelerator.accumulate(model, count=count):
            accelerator.backward(model(batch).square().mean())
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)
    torch.testing.assert_close(model.bias.grad, reference.bias.grad)


def test_uncounted_windows_divide_by_their_number_of_batches() -> None:
    model = nn.Linear(3, 1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = accelerator.prepare(model)
    x = torch.randn(2, 3)
    expected = torch.autograd.grad(model(x).sum(), model.weight)[0] / 4
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
    torch.testing.assert_close(model.weight.grad, expected)
    assert not accelerator.sync_gradients


@pytest.mark.parametrize("steps", [1, 2, 4, 5])
def test_one_optimizer_step_is_one_scheduler_step(steps: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer, loader, scheduler = accelerator.prepare(*_parts())
    taken = 0
    optimizer.optimizer.register_step_post_hook(lambda *_: _count())

    def _count() -> None:
        nonlocal taken
        taken += 1

    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert taken == -(-len(loader) // steps), "the last window ends with the data"
    assert scheduler.scheduler.last_epoch == taken


def test_a_skipped_step_does_not_step_the_scheduler() -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer, _, scheduler = accelerator.prepare(*_parts())
    optimizer._is_overflow = True
    scheduler.step()
    assert scheduler.scheduler.last_epoch == 0
    assert accelerator.optimizer_step_was_skipped


def test_metrics_see_every_sample_once() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(10), batch_size=4))
    assert torch.cat([accelerator.gather_for_metrics(batch) for batch in loader]).tolist() == list(range(10))
    assert accelerator.gather_for_metrics(["a", "b"]) == ["a", "b"]


def test_state_comes_back(tmp_path: Path) -> None:
    class Counter:
        value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare(*_parts())[0]
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for round_ in range(4):
        counter.value = round_
        accelerator.save_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]
    before = copy.deepcopy(model.state_dict())
    counter.value = 99
    nn.init.zeros_(model[0].weight)
    accelerator.load_state()
    assert counter.value == 3
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    with pytest.raises(OptionError, match="Item at index 0"):
        accelerator.register_for_checkpointing(object())


def test_the_step_counter_of_accelerates_folder_continues_its_window(tmp_path: Path) -> None:
    model, optimizer, _, _ = _parts()
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    generators = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save({"step": 6, **generators}, tmp_path / "random_states_0.pkl")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.load_state(tmp_path)
    assert accelerator.step == 6
    synchronised = []
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 3)).sum())
            synchronised.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
    assert synchronised == [False, True, False, False, False, True], "two of the window's four were before the save"


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    groups = find_tied(model)
    prepared = Accelerator(cpu=True).prepare(model)
    assert prepared[1].weight is prepared[0].weight
    model[1].weight = nn.Parameter(torch.zeros(2, 2))
    retie(model, groups)
    assert model[1].weight is model[0].weight


def test_clipping_is_torchs() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    for twin, parameter in zip(twins, parameters, strict=True):
        twin.grad = parameter.grad.clone()
    ours, theirs = clip_sharded_grad_norm(parameters, 0.5), nn.utils.clip_grad_norm_(twins, 0.5)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(total_norm(parameters), torch.tensor(0.5), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mixed_precision": "fp17"}, PrecisionError, "unknown mixed_precision mode: 'fp17'"),
        ({"mixed_precision": "fp16"}, PrecisionError, "requires a GPU"),
        ({"deepspeed_plugin": object()}, OptionError, "deepspeed_plugin is not supported"),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, OptionError, "only pass one AutocastKwargs"),
        ({"kwargs_handlers": [KwargsHandler()]}, OptionError, "is not supported"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3)},
            OptionError,
            "only pass one of",
        ),
        ({"log_with": "tensorboard"}, ValueError, "requires a `logging_dir`"),
    ],
)
def test_arguments_that_cannot_be_meant(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Accelerator(cpu=True, **arguments)


def test_backward_before_prepare() -> None:
    with pytest.raises(NotPreparedError, match="before any model was prepared"):
        Accelerator(cpu=True).backward(torch.ones(1, requires_grad=True).sum())


def test_batch_sizes_shrink_until_they_fit() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=10)
    def run(batch_size: int, name: str) -> str:
        tried.append(batch_size)
        if batch_size > 7:
            raise RuntimeError("CUDA out of memory.")
        return name

    assert run("done") == "done"
    assert tried == [10, 9, 8, 7]


def test_freeing_forgets_everything() -> None:
    accelerator = Accelerator(cpu=True)
    ready = accelerator.prepare(*_parts())
    assert accelerator.free_memory(*ready) == [None] * 4
    kept = [accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders]
    assert not any(kept)


def test_an_accelerator_can_be_pickled_with_what_it_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(DataLoader(TensorDataset(torch.arange(4.0))))
    (loader,) = pickle.loads(pickle.dumps(accelerator))._dataloaders
    assert [batch[0].item() for batch in loader] == [0.0, 1.0, 2.0, 3.0]


def _two_ranks(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    model, _, loader, _ = _parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(loader))
    with _logged() as lines:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert any("steps of the loader before prepare" in line for line in lines) == accelerator.is_main_process

    def save_hook(models: list[Any], weights: list[Any], folder: str) -> None:
        if accelerator.is_main_process:
            torch.save(models[0].state_dict(), f"{folder}/own.pt")
            weights.pop()

    def load_hook(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(f"{folder}/own.pt"))

    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    before = [value.clone() for value in model.state_dict().values()]
    moments = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    with torch.no_grad():
        _ = [value.zero_() for value in model.parameters()]
        _ = [state["momentum_buffer"].zero_() for state in optimizer.state.values()]
    accelerator.load_state(folder)
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert all(map(torch.equal, moments, [state["momentum_buffer"] for state in optimizer.state.values()]))


@contextmanager
def _logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("piledriver.accelerator")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@pytest.mark.slow
def test_hooks_that_save_on_the_main_process_and_a_schedule_for_the_undivided_loader(tmp_path: Path) -> None:
    from piledriver.runtime.launch.function import run_on_processes

    run_on_processes(_two_ranks, (str(tmp_path),), 2, fork=True)
