"""Recognise what a loop prepares (models, optimizers, schedulers, loaders) and prepare each."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from piledriver.accelerator.errors import OptionError, PreparedTwiceError
from piledriver.accelerator.options.handlers import DataLoaderConfiguration
from piledriver.accelerator.state.prepared import Prepared
from piledriver.accelerator.wrappers.optimizer import PreparedOptimizer
from piledriver.accelerator.wrappers.scheduler import PreparedScheduler
from piledriver.engine.apply import apply, apply_compute, apply_optimizer
from piledriver.engine.faults.lost_ranks import register_rank, watch_collectives
from piledriver.engine.mesh import Mesh
from piledriver.engine.precision import restore_forward
from piledriver.engine.state import is_on_meta, is_prepared, pipeline_call, pop_state
from piledriver.runtime.collectives.agreement import first_difference
from piledriver.runtime.collectives.operations import gather_object
from piledriver.runtime.world import World

_log = logging.getLogger(__name__)


def turn(thing: Any) -> int:
    """Return the order of preparation: models first, schedulers last."""
    return 0 if isinstance(thing, nn.Module) else 2 if is_scheduler(thing) else 1


def preparer_of(thing: Any) -> str | None:
    """Return which `prepare_*` a thing needs, None for things that are returned as they are."""
    if isinstance(thing, DataLoader):
        return "data_loader"
    if isinstance(thing, nn.Module):
        return "model"
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    return "scheduler" if is_scheduler(thing) else None


def is_scheduler(thing: Any) -> bool:
    """Return whether this is a learning-rate scheduler."""
    return isinstance(thing, (LRScheduler, ReduceLROnPlateau, PreparedScheduler))


def check_same_on_all_ranks(world: World, things: tuple[Any, ...]) -> None:
    """Raise unless all ranks prepare the same kinds of objects in the same order; otherwise they would deadlock."""
    if not world.is_distributed:
        return
    mine = ("prepare", tuple((f"[{i}]", _size(thing), type(thing).__name__) for i, thing in enumerate(things)))
    complaint = first_difference(gather_object(world, mine))
    if complaint is not None:
        from piledriver.runtime.errors import DisagreementError

        raise DisagreementError(complaint, fix="prepare the same objects in the same order on every process")


def _size(thing: Any) -> tuple[int, ...]:
    return (sum(p.numel() for p in thing.parameters()),) if isinstance(thing, nn.Module) else ()


def prepare_model(
    prepared: Prepared,
    model: nn.Module,
    *,
    place: bool,
    evaluation_mode: bool,
    weights: Any,
    loss_factor: Callable[[], float],
) -> nn.Module:
    """Move a model to its device and apply the layout, in place."""
    mesh, device = prepared.mesh, prepared.world.device
    if is_prepared(model):
        raise PreparedTwiceError(
            f"the model {type(model).__name__} was prepared by another Accelerator",
            fix="use one Accelerator, or free_memory() of the other first",
        )
    if pop_state(model) is not None:
        # Prepared before by a single process: only its precision is undone.
        restore_forward(model)
    if place and not is_on_meta(model) and not mesh.layout.streams_parameters:
        _place(model, device)
    if evaluation_mode:
        return apply_compute(model, mesh, prepared.options)
    before = dict(model.named_parameters())
    model = apply(model, mesh, device=device, weights=_filler(weights), options=prepared.options)
    prepared.parameters.record(model, before)
    for known in prepared.optimizers:
        _apply_optimizer(prepared, known.optimizer)
    if (call := pipeline_call(model)) is not None:
        call.factor = loss_factor
    if not mesh.alone:
        register_rank()
        watch_collectives(model, prepared.world)
    return model


def suggest_layout(model: nn.Module) -> None:
    """Log what a layout would gain for a model that is prepared without one, and the line to write."""
    from piledriver.engine.fused.gains import gains_of

    if (gains := gains_of(model)) is not None:
        _log.warning(
            "%s trains as it is. To %s: from piledriver.engine import Layout; "
            "accelerator = Accelerator(layout=Layout(precision='bf16'))",
            type(model).__name__,
            gains,
        )


def _place(model: nn.Module, device: torch.device) -> None:
    """Move a model to the device in place. Tied parameters stay one object."""
    if any(tensor.device != device for tensor in [*model.parameters(), *model.buffers()]):
        model.to(device)


def _filler(weights: Any) -> Any:
    """Return a seed or a function unchanged, a path as the function that loads from it."""
    if callable(weights) or isinstance(weights, int):
        return weights
    from piledriver.checkpoint import load_model

    return functools.partial(load_model, path=weights)


def _apply_optimizer(prepared: Prepared, optimizer: Any) -> None:
    if isinstance(optimizer, torch.optim.Optimizer):
        apply_optimizer(optimizer, prepared.mesh, prepared.parameters)


def prepare_optimizer(prepared: Prepared, optimizer: Any, *, place: bool) -> PreparedOptimizer:
    """Wrap an optimizer, whose groups then hold the parameters of the prepared models."""
    for known in prepared.optimizers:
        if known.optimizer is optimizer:
            raise PreparedTwiceError(
                f"the optimizer {type(optimizer).__name__} is prepared already",
                fix="use what the first prepare returned",
            )
    if prepared.models:
        _apply_optimizer(prepared, optimizer)
    return PreparedOptimizer(
        optimizer,
        device_placement=place,
        scaler=prepared.scaler,
        gradient_state=prepared.gradient_state,
        device=prepared.world.device if place else None,
    )


def prepare_scheduler(prepared: Prepared, scheduler: Any, **options: Any) -> PreparedScheduler:
    """Wrap a scheduler, which then follows the prepared optimizer that it belongs to."""
    inner = getattr(scheduler, "optimizer", None)
    followed = [known for known in prepared.optimizers if inner is known or inner is known.optimizer]
    return PreparedScheduler(
        scheduler, followed or list(prepared.optimizers), gradient_state=prepared.gradient_state, **options
    )


def schedule_length(scheduler: Any) -> int | None:
    """Return the steps after which a schedule ends, where the scheduler tells.

    >>> optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    >>> schedule_length(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10))
    10
    """
    for name in ("total_steps", "T_max", "total_iters"):
        if isinstance(getattr(scheduler, name, None), int):
            return int(getattr(scheduler, name))
    for function in getattr(scheduler, "lr_lambdas", ()):
        # transformers binds the length as a keyword, diffusers in a closure.
        held = getattr(function, "keywords", None) or (
            inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        )
        if isinstance(held.get("num_training_steps"), int):
            return int(held["num_training_steps"])
    return None


def undivided_schedule(given: Sequence[Any], ready: Sequence[Any], batches_per_step: int) -> str | None:
    """Return a warning if a schedule has the length of a loader before it was divided between ranks, else None."""
    loaders = [(a, b) for a, b in zip(given, ready, strict=True) if isinstance(a, DataLoader) and a is not b]
    for before, after in loaders:
        try:
            whole, share = (-(-len(loader) // batches_per_step) for loader in (before, after))
        except TypeError:
            continue
        for length in map(schedule_length, filter(is_scheduler, given)):
            if length and share < whole and length % whole == 0:
                return (
                    f"a scheduler was made for {length} steps, {length // whole} x {whole} steps of the loader before "
                    f"prepare; an epoch on this many ranks has {share}, so the schedule would not reach its end. Fix: "
                    "make it from len(loader) after prepare, or use piledriver.compat.accelerate, which steps it once "
                    "per rank"
                )
    return None


def prepare_loader(
    prepared: Prepared,
    loader: Any,
    config: DataLoaderConfiguration,
    *,
    place: bool,
    slice_fn: Any,
    rng_types: list[Any],
) -> Any:
    """Return this rank's share of a loader, which reports its end to the gradient state."""
    from piledriver.data import prepare_data_loader

    mesh = prepared.mesh
    ready: Any = prepare_data_loader(
        loader,
        prepared.world.device,
        num_processes=mesh.layout.data_size,
        process_index=mesh.data_rank,
        torch_device_mesh=mesh.batch,
        split_batches=config.split_batches,
        put_on_device=place,
        rng_types=rng_types,
        dispatch_batches=_dispatches(config.dispatch_batches, mesh),
        even_batches=config.even_batches,
        slice_fn_for_dispatch=slice_fn,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
    )
    ready.gradient_state = prepared.gradient_state
    ready._is_accelerate_prepared = True
    return ready


def _dispatches(wanted: bool | None, mesh: Mesh) -> bool | None:
    """Return False under axes whose ranks share a batch: a dispatcher sends each rank another one."""
    if mesh.model_parallel_size == 1:
        return wanted
    if wanted:
        raise OptionError("dispatch_batches with tensor, context or pipeline axes", fix="leave dispatch_batches out")
    return False
