"""`Accelerator`: the verbs of a training loop. Each one delegates to the room that implements it.

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model, count=batch["tokens"]):
            accelerator.backward(model(batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(); scheduler.step(); optimizer.zero_grad()

The names and arguments are those of Hugging Face Accelerate; docs/accelerate.md lists where ours differs and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from piledriver.accelerator import prepare
from piledriver.accelerator.checkpointing import CheckpointMixin
from piledriver.accelerator.errors import OptionError
from piledriver.accelerator.gradients import GradientsMixin
from piledriver.accelerator.memory import release_memory
from piledriver.accelerator.metrics import gather_for_metrics
from piledriver.accelerator.options.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from piledriver.accelerator.options.plugins import fsdp_from_environment, layout_from_plugins
from piledriver.accelerator.options.resolve import (
    Handlers,
    engine_options,
    reject_foreign_plugins,
    resolve_accumulation,
    resolve_precision,
    resolve_project,
)
from piledriver.accelerator.saving.state_saver import StateSaver
from piledriver.accelerator.state.accumulation import GradientState, ItemMean
from piledriver.accelerator.state.prepared import Prepared
from piledriver.accelerator.state.process_info import RunState
from piledriver.accelerator.tracking import Trackers
from piledriver.engine.detach import detach
from piledriver.engine.layout import Layout, resolve_layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.optimizer import make_scaler
from piledriver.engine.precision import check_device
from piledriver.runtime.collectives.operations import broadcast_object, gather, pad_across_processes, reduce
from piledriver.runtime.collectives.trigger import Trigger
from piledriver.runtime.connection import connect
from piledriver.runtime.world import World, current_world

if TYPE_CHECKING:
    from piledriver.engine.fused.report import FuseReport
    from piledriver.engine.memory import MemoryReport

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Accelerator(GradientsMixin, CheckpointMixin):
    """One loop on any hardware.

    >>> accelerator = Accelerator(cpu=True)
    >>> model = nn.Linear(2, 1)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> accelerator.backward(model(torch.ones(1, 2)).sum())
    >>> optimizer.step()
    """

    scheduler_steps_per_optimizer_step = 1
    """One optimizer step is one scheduler step, on any number of processes."""

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        layout: Layout | Literal["auto"] | None = None,
        world: World | None = None,
    ) -> None:
        reject_foreign_plugins(
            deepspeed_plugin=deepspeed_plugin or deepspeed_plugins, megatron_lm_plugin=megatron_lm_plugin
        )
        handlers = Handlers.sorted_out(kwargs_handlers)
        if dynamo_plugin is not None and dynamo_backend is not None:
            raise OptionError("both dynamo_plugin and dynamo_backend were given", fix="give one of them")
        self.dynamo_plugin = dynamo_plugin or TorchDynamoPlugin(backend=dynamo_backend)
        self._enter_world(cpu, handlers.process_group, mixed_precision, world)
        self._chooses_layout = layout == "auto"
        if isinstance(layout, str):
            layout = self._layout_until_chosen(layout)
        fsdp_plugin, parallelism_config = self._default_plugins(layout, fsdp_plugin, parallelism_config)
        plain = layout is None and fsdp_plugin is None and parallelism_config is None and torch_tp_plugin is None
        self._suggests_layout = plain and self.device.type == "cuda" and self.world.is_main
        layout = layout_from_plugins(
            layout,
            self.world,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            parallelism=parallelism_config,
        )
        layout = resolve_layout(layout, self.mixed_precision, compile=self.dynamo_plugin.compiles)
        check_device(layout, self.device)
        self.device_placement = device_placement
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        if split_batches is not None:
            self.dataloader_config.split_batches = split_batches
        self.gradient_state = self._make_gradient_state(
            resolve_accumulation(gradient_accumulation_plugin, gradient_accumulation_steps)
        )
        self.autocast_handler: AutocastKwargs = handlers.autocast
        self.ddp_handler: DistributedDataParallelKwargs | None = handlers.ddp
        self.scaler_handler: GradScalerKwargs | None = handlers.scaler
        self.init_handler: InitProcessGroupKwargs | None = handlers.process_group
        self.profile_handler: ProfileKwargs | None = handlers.profile
        scaling = handlers.scaler.to_kwargs() if handlers.scaler is not None else {}
        self.scaler: Any = make_scaler(layout, self.device, **scaling)
        self._prepared = Prepared(
            world=self.world,
            mesh=make_mesh(layout, self.device.type),
            options=engine_options(handlers, self.dynamo_plugin),
            gradient_state=self.gradient_state,
            scaler=self.scaler,
        )
        if self.scaler is not None:
            self.scaler.models = self._prepared.models
        self.native_amp = self.mixed_precision in ("fp16", "bf16")
        self.project_configuration = resolve_project(project_config, project_dir)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = list(rng_types) if rng_types is not None else ["generator"]
        self._item_mean = ItemMean()
        self._last_loss: torch.Tensor | None = None
        self._backwards = 0
        self._warned_of_schedule = False
        self._trigger = Trigger(self.world)
        self._saver = StateSaver()
        self._tracking = self._make_trackers(log_with)

    def _enter_world(
        self, cpu: bool, process_group: InitProcessGroupKwargs | None, precision: Any, world: World | None
    ) -> None:
        """Detect the world and connect. The compatible subclass uses its shared state."""
        self.world = world if world is not None else current_world(device="cpu" if cpu else None)
        self._mixed_precision = resolve_precision(precision)
        self.state: Any = RunState(self.world, self._mixed_precision)
        connect(self.world, timeout=process_group.timeout if process_group is not None else None)

    def _layout_until_chosen(self, word: str) -> Layout:
        """Return the layout that stands until the first model is prepared, for `layout="auto"`."""
        if word != "auto":
            raise OptionError(f"layout is {word!r}", fix='give a Layout, or "auto"')
        return Layout(compile=False)

    def use_layout(self, layout: Layout) -> None:
        """Replace the layout. All ranks call this together, before the first model is prepared."""
        if self._models:
            raise OptionError("a model was prepared in another layout", fix="choose the layout before prepare")
        self._chooses_layout = False
        layout = resolve_layout(layout, self.mixed_precision, compile=self.dynamo_plugin.compiles)
        check_device(layout, self.device)
        self._prepared.mesh = make_mesh(layout, self.device.type)

    def _choose_layout(self, things: Sequence[Any]) -> None:
        """Choose the layout for the first model among things to be prepared; rank 0 decides."""
        model = next((thing for thing in things if isinstance(thing, nn.Module)), None)
        if model is None:
            return
        from piledriver.plan.hardware.here import detect_cluster
        from piledriver.plan.training import choose_for_model

        sizes = [size for thing in things if isinstance(size := getattr(thing, "batch_size", None), int)]
        precision = {"no": "fp32"}.get(self.mixed_precision, self.mixed_precision)
        chosen = None
        if self.world.is_main:
            cluster = detect_cluster(self.world.size)
            choice = choose_for_model(model, cluster, precision=precision, sequences=sizes[0] if sizes else None)
            _log.info("layout: %s", choice.reason)
            chosen = choice.layout
        self.use_layout(broadcast_object(self.world, chosen))

    def _default_plugins(self, layout: Layout | None, fsdp: Any, parallelism: Any) -> tuple[Any, Any]:
        """Return the plugins given, or what `accelerate launch` left in the environment; a layout overrules these."""
        return fsdp if fsdp is not None or layout is not None else fsdp_from_environment(), parallelism

    def _make_gradient_state(self, plugin: GradientAccumulationPlugin) -> GradientState:
        return GradientState(plugin)

    def _make_trackers(self, log_with: Any) -> Trackers:
        return Trackers(log_with, self.logging_dir)

    # Prepare.

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, schedulers and loaders; return them in the order given.

        A model stays the same object, without a wrapper. Anything unknown is returned as it is.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise OptionError(
                f"device_placement has {len(device_placement)} entries for {len(args)} objects", fix="give one for each"
            )
        if self._chooses_layout:
            self._choose_layout(args)
        placement: list[bool | None] = list(device_placement) if device_placement is not None else [None] * len(args)
        prepare.check_same_on_all_ranks(self.world, args)
        ready = {
            index: self._prepare_one(thing, placement[index])
            for index, thing in sorted(enumerate(args), key=lambda pair: prepare.turn(pair[1]))
        }
        result = tuple(ready[index] for index in range(len(args)))
        if self._steps_once:
            warning = prepare.undivided_schedule(args, result, self.gradient_state.num_steps)
            if warning is not None and not self._warned_of_schedule:
                self._warned_of_schedule = True
                _log.warning(warning)
        return result if len(result) > 1 else result[0] if result else result

    @property
    def _steps_once(self) -> bool:
        """Return whether schedulers step once per optimizer step on several ranks that divide the batches."""
        per_step = self.scheduler_steps_per_optimizer_step
        return per_step == 1 and self.world.is_main and self.step_scheduler_with_optimizer and not self.split_batches

    def _prepare_one(self, thing: Any, placement: bool | None) -> Any:
        match prepare.preparer_of(thing):
            case "model":
                return self.prepare_model(thing, device_placement=placement)
            case "optimizer":
                return self.prepare_optimizer(thing, device_placement=placement)
            case "scheduler":
                return self.prepare_scheduler(thing)
            case "data_loader":
                return self.prepare_data_loader(thing, device_placement=placement)
            case _:
                return thing

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        *,
        weights: int | str | PathLike[str] | Callable[[nn.Module], Any] = 0,
    ) -> nn.Module:
        """Move a model to its device and apply the layout, in place.

        `weights` are for a model on the meta device: the seed to initialise from, a folder or file from which each rank
        loads its own shards, or a function that fills it.
        """
        if any(model is known for known in self._models):
            return model
        if self._chooses_layout:
            self._choose_layout([model])
        self._check_quantised(model)
        if self._suggests_layout:
            prepare.suggest_layout(model)
            self._suggests_layout = False
        model = prepare.prepare_model(
            self._prepared,
            model,
            place=self._places(device_placement) and not _is_dispatched(model),
            evaluation_mode=evaluation_mode,
            weights=weights,
            loss_factor=self._loss_factor,
        )
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        self._models.append(model)
        return model

    def _places(self, device_placement: bool | None) -> bool:
        return self.device_placement if device_placement is None else device_placement

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Return an optimizer that steps when a window ends."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return _listed(self._optimizers, optimizer)
        place = self._places(device_placement)
        return _listed(self._optimizers, prepare.prepare_optimizer(self._prepared, optimizer, place=place))

    def memory_report(self) -> MemoryReport:
        """Return the bytes of parameters, gradients and optimizer states on this rank."""
        from piledriver.engine.memory import measure

        return measure(self._models, [getattr(one, "optimizer", one) for one in self._optimizers])

    def describe(self, model: nn.Module) -> FuseReport:
        """Print and return which operators of a prepared model were replaced where, what was left, and why."""
        from piledriver.engine.fused.report import fuse_report

        prepared = any(model is known for known in self._models)
        report = fuse_report(model, self._prepared.mesh.layout if prepared else None)
        if self.world.is_main:
            print(report)
        return report

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a scheduler that steps with its optimizer."""
        if getattr(scheduler, "_is_accelerate_prepared", False):
            return _listed(self._schedulers, scheduler)
        wrapped = prepare.prepare_scheduler(
            self._prepared,
            scheduler,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
            steps_per_optimizer_step=self.scheduler_steps_per_optimizer_step,
        )
        return _listed(self._schedulers, wrapped)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a loader of this rank's share of the batches."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return _listed(self._dataloaders, data_loader)
        share = prepare.prepare_loader(
            self._prepared,
            data_loader,
            self.dataloader_config,
            place=self._places(device_placement),
            slice_fn=slice_fn_for_dispatch,
            rng_types=list(self.rng_types),
        )
        return _listed(self._dataloaders, share)

    # Collectives.

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of every rank along the first dimension."""
        return gather(self.world, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather without the samples that pad the last batch."""
        readers = self.mesh.readers if self.mesh.model_parallel_size > 1 else None
        return gather_for_metrics(self.world, self.gradient_state, input_data, use_gather_object, readers)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over ranks by sum or mean; ranks that read the same batch (tensor axis and others) count as one."""
        if reduction == "sum":
            scale /= self.mesh.model_parallel_size
        return reduce(self.world, tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad to the longest of all ranks, so that it can be gathered."""
        return pad_across_processes(self.world, tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set a flag that all ranks see at their next `check_trigger`."""
        self._trigger.raise_flag()

    def check_trigger(self) -> bool:
        """Return whether any rank set the trigger since the last check. Every rank must call this."""
        return self._trigger.check()

    # Memory.

    def free_memory(self, *objects: Any) -> list[None]:
        """Release everything prepared: `model, optimizer = accelerator.free_memory(model, optimizer)`."""
        for model in self._models:
            detach(model)
        self._prepared.clear()
        self._saver.close()
        self._last_loss = None
        self.gradient_state.step = 0
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a device map places a model on several devices."""
        return any(
            len(set(getattr(module, "hf_device_map", {}).values())) > 1
            for module in model.modules()
            if hasattr(module, "hf_device_map")
        )

    def _check_quantised(self, model: Any) -> None:
        quantised = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
        places = set(getattr(model, "hf_device_map", {}).values())
        if quantised and places & {"cpu", "disk"}:
            raise OptionError(
                "a model loaded in 8-bit or 4-bit precision with CPU or disk offload cannot be trained",
                fix="load it on one device",
            )

    def __deepcopy__(self, memo: Any) -> Accelerator:
        # There is one process group, which a copy could not have again.
        return self


def _listed(known: list[Any], thing: T) -> T:
    if not any(thing is one for one in known):
        known.append(thing)
    return thing


def _is_dispatched(model: nn.Module) -> bool:
    """Return whether a device map places the model on several devices, where it must stay."""
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1
