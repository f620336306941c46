"""What kind of thing is this, and how is it made ready: models, optimizers, schedulers, loaders."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from piledriver.accelerator import compiling, precision, strategy
from piledriver.accelerator.errors import OptionError, PreparedTwiceError
from piledriver.accelerator.optimizer import PreparedOptimizer
from piledriver.accelerator.replicas import reducer_of
from piledriver.accelerator.scheduler import PreparedScheduler
from piledriver.engine import tied_weights as tied
from piledriver.engine.lost_ranks import register_rank
from piledriver.engine.marks import is_on_meta, is_prepared
from piledriver.runtime.collectives.agreement import first_difference
from piledriver.runtime.collectives.operations import gather_object
from piledriver.runtime.world import World

if TYPE_CHECKING:
    from piledriver.accelerator.accelerator import Accelerator


def prepare_all(accelerator: Accelerator, things: tuple[Any, ...], placement: list[bool | None]) -> tuple[Any, ...]:
    """Returned in the order given; made ready models first, then optimizers, which follow them, schedulers last."""
    agree(accelerator.world, things)
    ready = {
        index: accelerator.prepare_scheduler(thing)
        if is_scheduler(thing)
        else _one(accelerator, thing, placement[index])
        for index, thing in sorted(enumerate(things), key=lambda pair: _turn(pair[1]))
    }
    return tuple(ready[index] for index in range(len(things)))


def _turn(thing: Any) -> int:
    return 0 if isinstance(thing, nn.Module) else 2 if is_scheduler(thing) else 1


def _one(accelerator: Accelerator, thing: Any, placement: bool | None) -> Any:
    if isinstance(thing, DataLoader):
        return accelerator.prepare_data_loader(thing, device_placement=placement)
    if isinstance(thing, nn.Module):
        return accelerator.prepare_model(thing, device_placement=placement)
    if isinstance(thing, torch.optim.Optimizer):
        return accelerator.prepare_optimizer(thing, device_placement=placement)
    return thing


def is_scheduler(thing: Any) -> bool:
    """Whether this steps a learning rate."""
    return isinstance(thing, (LRScheduler, ReduceLROnPlateau, PreparedScheduler))


def agree(world: World, things: tuple[Any, ...]) -> None:
    """All ranks must prepare the same kinds of things in the same order: otherwise they would wait for each other."""
    if not world.is_distributed:
        return
    mine = ("prepare", tuple((f"[{i}]", _size(thing), type(thing).__name__) for i, thing in enumerate(things)))
    complaint = first_difference(gather_object(world, mine))
    if complaint is not None:
        from piledriver.runtime.errors import DisagreementError

        raise DisagreementError(complaint, fix="prepare the same objects in the same order on every process")


def _size(thing: Any) -> tuple[int, ...]:
    return (sum(p.numel() for p in thing.parameters()),) if isinstance(thing, nn.Module) else ()


def ready_model(
    accelerator: Accelerator, model: nn.Module, placed: bool, evaluation_mode: bool, weights: Any = 0
) -> nn.Module:
    """Place, set the precision, lay out, compile: all in place. Tied parameters are tied afterwards as before."""
    if reducer_of(model) is not None or is_prepared(model):
        raise PreparedTwiceError(
            f"the model {type(model).__name__} was prepared by another Accelerator",
            fix="use one Accelerator, or free_memory() of the other first",
        )
    groups = tied.find_tied(model)
    stays_on_host = accelerator.layout is not None and accelerator.layout.offload == "parameters"
    if placed and not is_on_meta(model) and not stays_on_host:
        strategy.place(model, accelerator.device)
    if accelerator.layout is None:
        precision.compute_in(model, accelerator.mixed_precision, accelerator.device, accelerator.autocast_handler)
    if not evaluation_mode:
        before = dict(model.named_parameters())
        accelerator.strategy.lay_out(model, _filler(weights))
        if accelerator.layout is not None:
            _layouts().follow_layout(accelerator, model, before)
    if accelerator.layout is None or accelerator.layout.pp == 1:
        tied.retie(model, groups)
    compiling.compile_in_place(model, accelerator.dynamo_plugin)
    if accelerator.world.is_distributed and not evaluation_mode:
        register_rank()
        if accelerator.layout is not None:
            _layouts().watch(accelerator, model)
    return model


def _layouts() -> Any:
    # torch's sharded tensors and all that knows of them take half as long to import as torch: only for who has any.
    from piledriver.accelerator import layouts

    return layouts


def _filler(weights: Any) -> Any:
    """A seed or a function as it is; a path as the function that loads from there."""
    if callable(weights) or isinstance(weights, int):
        return weights
    from piledriver.checkpoint import load_model

    return functools.partial(load_model, path=weights)


def ready_optimizer(accelerator: Accelerator, optimizer: Any, placed: bool) -> PreparedOptimizer:
    """Stand before the optimizer."""
    for known in accelerator._optimizers:
        if known.optimizer is optimizer:
            raise PreparedTwiceError(
                f"the optimizer {type(optimizer).__name__} is prepared already",
                fix="use what the first prepare returned",
            )
    if accelerator._models and accelerator.layout is not None:
        _layouts().lay_out_optimizer(accelerator, optimizer)
    return PreparedOptimizer(
        optimizer,
        device_placement=placed,
        scaler=accelerator.scaler,
        gradient_state=accelerator.gradient_state,
        device=accelerator.device if placed else None,
    )


def ready_scheduler(accelerator: Accelerator, scheduler: Any) -> PreparedScheduler:
    """Stand before the scheduler, following the prepared optimizer that it belongs to."""
    inner = getattr(scheduler, "optimizer", None)
    followed = [known for known in accelerator._optimizers if inner is known or inner is known.optimizer]
    return PreparedScheduler(
        scheduler,
        followed or list(accelerator._optimizers),
        step_with_optimizer=accelerator.step_scheduler_with_optimizer,
        split_batches=accelerator.split_batches,
        gradient_state=accelerator.gradient_state,
        steps_per_optimizer_step=accelerator.scheduler_steps_per_optimizer_step,
    )


def _dispatches(wanted: bool | None, mesh: Any) -> bool | None:
    """One process reading for all deals out by rank: where several ranks take the same batch, each reads for itself."""
    if mesh is None or mesh.model_parallel_size == 1:
        return wanted
    if wanted:
        raise OptionError("dispatch_batches with tensor, context or pipeline axes", fix="leave dispatch_batches out")
    return False


def ready_data_loader(accelerator: Accelerator, loader: Any, placed: bool, slice_fn: Any) -> Any:
    """This process's share of a loader, that tells us when it is at its end."""
    from piledriver.data import prepare_data_loader

    config, mesh = accelerator.dataloader_config, accelerator.mesh
    ready: Any = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=accelerator.num_processes if mesh is None else mesh.layout.data_size,
        process_index=accelerator.process_index if mesh is None else mesh.data_rank,
        torch_device_mesh=accelerator.torch_device_mesh,
        split_batches=config.split_batches,
        put_on_device=placed,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=_dispatches(config.dispatch_batches, mesh),
        even_batches=config.even_batches,
        slice_fn_for_dispatch=slice_fn,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
    )
    ready.gradient_state = accelerator.gradient_state
    ready._is_accelerate_prepared = True
    return ready
