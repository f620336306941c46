"""`Accelerator`: the verbs that a training loop says. Each one asks the room that knows; nothing is decided here twice.

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

from collections.abc import Callable, MutableMapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from piledriver.accelerator import prepare
from piledriver.accelerator.accumulation import GradientState, ItemMean
from piledriver.accelerator.checkpointing import Keeping
from piledriver.accelerator.errors import OptionError
from piledriver.accelerator.gradients import Gradients
from piledriver.accelerator.memory import release_memory
from piledriver.accelerator.metrics import gather_for_metrics
from piledriver.accelerator.options import (
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
from piledriver.accelerator.plugins import layout_of_plugins
from piledriver.accelerator.precision import check_precision, grad_scaler, resolve_precision
from piledriver.accelerator.process_info import RunState
from piledriver.accelerator.saving import StateSaver
from piledriver.accelerator.settings import (
    Handlers,
    agreed_layout,
    resolve_accumulation,
    resolve_project,
    say_what_is_missing,
)
from piledriver.accelerator.strategy import Strategy, choose_strategy, meshes_of
from piledriver.accelerator.tracking import Trackers
from piledriver.engine import Layout
from piledriver.runtime.collectives.operations import gather, pad_across_processes, reduce
from piledriver.runtime.collectives.trigger import Trigger
from piledriver.runtime.connection import connect
from piledriver.runtime.world import World, detect_world

if TYPE_CHECKING:
    from piledriver.engine.memory import MemoryReport
    from piledriver.engine.mesh import Mesh

T = TypeVar("T")


class Accelerator(Gradients, Keeping):
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
        layout: Layout | None = None,
        world: World | None = None,
    ) -> None:
        say_what_is_missing(
            deepspeed_plugin=deepspeed_plugin or deepspeed_plugins, megatron_lm_plugin=megatron_lm_plugin
        )
        handlers = Handlers.sorted_out(kwargs_handlers)
        self._enter_world(cpu, handlers.process_group, mixed_precision, world)
        layout = layout_of_plugins(
            layout,
            self.world,
            fsdp_plugin=self._fsdp_plugin(fsdp_plugin),
            torch_tp_plugin=torch_tp_plugin,
            parallelism=parallelism_config,
        )
        self.layout = agreed_layout(layout, self.mixed_precision)
        self.mesh: Mesh | None = meshes_of(self.layout, self.device)
        check_precision(self.mixed_precision, self.device, engine=self.layout is not None)
        self.device_placement = device_placement
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        if split_batches is not None:
            self.dataloader_config.split_batches = split_batches
        self.gradient_state = self._make_gradient_state(
            resolve_accumulation(gradient_accumulation_plugin, gradient_accumulation_steps)
        )
        self.autocast_handler: AutocastKwargs = handlers.autocast
        self.ddp_handler: DistributedDataParallelKwargs | None = handlers.replicas
        self.scaler_handler: GradScalerKwargs | None = handlers.scaler
        self.init_handler: InitProcessGroupKwargs | None = handlers.process_group
        self.profile_handler: ProfileKwargs | None = handlers.profile
        if dynamo_plugin is not None and dynamo_backend is not None:
            raise OptionError("both dynamo_plugin and dynamo_backend were given", fix="give one of them")
        self.dynamo_plugin = dynamo_plugin or TorchDynamoPlugin(backend=dynamo_backend)
        self.scaler: Any = grad_scaler(self.mixed_precision, self.device, self.scaler_handler, self.layout)
        self.native_amp = self.mixed_precision in ("fp16", "bf16")
        self.project_configuration = resolve_project(project_config, project_dir)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = list(rng_types) if rng_types is not None else ["generator"]
        self.strategy: Strategy = choose_strategy(self.world, self.ddp_handler, self.mesh)
        # Weakly: the whole parameters must go once no optimizer refers to them.
        self._replaced: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()
        self._gone: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []
        self._dataloaders: list[Any] = []
        self._item_mean = ItemMean()
        self._last_loss: torch.Tensor | None = None
        self._backwards = 0
        self._trigger = Trigger(self.world)
        self._saver = StateSaver()
        self._tracking = self._make_trackers(log_with)

    def _enter_world(
        self, cpu: bool, process_group: InitProcessGroupKwargs | None, precision: Any, world: World | None
    ) -> None:
        """Find out who we are and connect. The compatible subclass looks into its shared state first."""
        self.world = world if world is not None else detect_world(device="cpu" if cpu else None)
        self._mixed_precision = resolve_precision(precision)
        self.state: Any = RunState(self.world, self._mixed_precision)
        connect(self.world, timeout=process_group.timeout if process_group is not None else None)

    def _fsdp_plugin(self, given: Any) -> Any:
        """The compatible subclass looks into the environment where none was given."""
        return given

    def _make_gradient_state(self, plugin: GradientAccumulationPlugin) -> GradientState:
        return GradientState(plugin)

    def _make_trackers(self, log_with: Any) -> Trackers:
        return Trackers(log_with, self.logging_dir)

    def __getstate__(self) -> dict[str, Any]:
        # Which tensor took whose place is known by identity, which a copy does not share.
        return {name: value for name, value in self.__dict__.items() if name not in ("_replaced", "_gone")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _replaced=WeakIdKeyDictionary(), _gone=WeakIdKeyDictionary())

    # Prepare.

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Make models, optimizers, schedulers and loaders ready for this world; returned in the order given.

        A model is the object that it was: nothing is put around it. Anything unknown is returned as it is.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise OptionError(
                f"device_placement has {len(device_placement)} entries for {len(args)} objects", fix="give one for each"
            )
        placement: list[bool | None] = list(device_placement) if device_placement is not None else [None] * len(args)
        ready = prepare.prepare_all(self, args, placement)
        return ready if len(ready) > 1 else ready[0] if ready else ready

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        *,
        weights: int | str | PathLike[str] | Callable[[nn.Module], Any] = 0,
    ) -> nn.Module:
        """Place a model, set its precision, lay it out over the processes: in place.

        `weights` are for a model on the meta device: the seed to initialise it from, a folder or file to load, each
        process its own part, or a function that fills it.
        """
        if any(model is known for known in self._models):
            return model
        self._check_quantised(model)
        placed = self.device_placement if device_placement is None else device_placement
        model = prepare.ready_model(self, model, placed and not _is_dispatched(model), evaluation_mode, weights)
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        self._models.append(model)
        if self.layout is not None and self.scaler is not None:
            self.scaler.models = self._models
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """An optimizer that steps when a window ends."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return _listed(self._optimizers, optimizer)
        placed = self.device_placement if device_placement is None else device_placement
        return _listed(self._optimizers, prepare.ready_optimizer(self, optimizer, placed))

    def memory_report(self) -> MemoryReport:
        """Bytes of parameters, gradients and optimizer states that this process holds, and what the layout asks for."""
        from piledriver.engine.memory import measure

        return measure(self._models, [getattr(one, "optimizer", one) for one in self._optimizers], self.mesh)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """A scheduler that steps once when its optimizer did."""
        if getattr(scheduler, "_is_accelerate_prepared", False):
            return _listed(self._schedulers, scheduler)
        return _listed(self._schedulers, prepare.ready_scheduler(self, scheduler))

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """This process's share of a loader."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return _listed(self._dataloaders, data_loader)
        placed = self.device_placement if device_placement is None else device_placement
        return _listed(self._dataloaders, prepare.ready_data_loader(self, data_loader, placed, slice_fn_for_dispatch))

    # Other processes.

    def gather(self, tensor: Any) -> Any:
        """Every process's tensors, joined along the first dimension."""
        return gather(self.world, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The same without samples that only fill up the last batch."""
        some = self.mesh is not None and self.mesh.model_parallel_size > 1
        readers = self.mesh.readers if some and self.mesh is not None else None
        return gather_for_metrics(self.world, self.gradient_state, input_data, use_gather_object, readers)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over processes; those that read the same batch (tensor axis and others) count as one."""
        if reduction == "sum" and self.mesh is not None:
            scale /= self.mesh.model_parallel_size
        return reduce(self.world, tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad to the longest of all processes, so that it can be gathered."""
        return pad_across_processes(self.world, tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Ask all processes for something; they hear it at their next `check_trigger`."""
        self._trigger.raise_flag()

    def check_trigger(self) -> bool:
        """Whether any process asked since the last check. Every process must call it."""
        return self._trigger.check()

    # Memory.

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything prepared: `model, optimizer = accelerator.free_memory(model, optimizer)`."""
        for model in self._models:
            self.strategy.release(model)
        for kept in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            kept.clear()
        self._saver.close()
        self._last_loss = None
        self.gradient_state.step = 0
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether parts of a model were placed on several devices by hand."""
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
        # It stands for this process's place in the world, of which there is one.
        return self


def _listed(known: list[Any], thing: T) -> T:
    if not any(thing is one for one in known):
        known.append(thing)
    return thing


def _is_dispatched(model: nn.Module) -> bool:
    """Whether a model was spread over devices by hand: it must stay where it is."""
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1
