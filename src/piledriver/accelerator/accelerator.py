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

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from piledriver.accelerator import prepare, uneven
from piledriver.accelerator.accumulation import Count, GradientState, ItemMean
from piledriver.accelerator.answers import Answers
from piledriver.accelerator.errors import NotPreparedError, OptionError
from piledriver.accelerator.facts import RunState
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
from piledriver.accelerator.precision import (
    autocast_context,
    check_precision,
    grad_scaler,
    is_unscaled,
    resolve_precision,
)
from piledriver.accelerator.saving import StateSaver
from piledriver.accelerator.settings import (
    Handlers,
    agreed_layout,
    resolve_accumulation,
    resolve_project,
    say_what_is_missing,
)
from piledriver.accelerator.strategy import Strategy, choose_strategy
from piledriver.accelerator.tracking import Trackers
from piledriver.accelerator.unwrap import unwrap
from piledriver.engine import Layout, clipping
from piledriver.engine.finite import check_finite
from piledriver.engine.laid_out import stepped_on
from piledriver.engine.loss_scale import LossScaler
from piledriver.engine.lost import naming_the_lost
from piledriver.engine.memory import MemoryReport, measure
from piledriver.engine.mesh import Meshes, make_meshes
from piledriver.engine.whole import whole_state
from piledriver.runtime.agreement import check_agreement
from piledriver.runtime.collectives import gather, pad_across_processes, reduce
from piledriver.runtime.connection import connect, disconnect
from piledriver.runtime.trigger import Trigger
from piledriver.runtime.world import World, detect_world

T = TypeVar("T")


class Accelerator(Answers):
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
        self.meshes: Meshes | None = None if self.layout is None else make_meshes(self.layout, self.device.type)
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
        self.strategy: Strategy = choose_strategy(self.world, self.ddp_handler, self.meshes)
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
        if isinstance(self.scaler, LossScaler):
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
        return measure(self._models, [getattr(one, "optimizer", one) for one in self._optimizers], self.meshes)

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

    # Gradients.

    @property
    def sync_gradients(self) -> bool:
        """Whether a window ends with this batch: gradients are averaged and the optimizer steps."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches per window."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = steps

    @property
    def step(self) -> int:
        """Batches since the last loader's end."""
        return self.gradient_state.step

    @step.setter
    def step(self, step: int) -> None:
        self.gradient_state.step = step

    @contextmanager
    def accumulate(self, *models: nn.Module, count: Count | None = None) -> Iterator[None]:
        """One batch of a window: gradients stay local until the window ends, then are averaged over processes.

        `count` is how many items (tokens, samples) this batch's loss is the mean of. With it the window's gradient is
        the mean over every item on every process; without it batches weigh alike, as in Accelerate.
        """
        ends = self.gradient_state.next_batch()
        if count is not None or self._item_mean.batch_weight is not None:
            self._item_mean.begin_batch(
                count,
                ends,
                gradients=(one for model in models or self._models for one in self.strategy.gradients(model)),
                add_up=self.strategy.add_up,
                averaged_over=self.strategy.averaged_over,
                loss_is_of_all=self.strategy.loss_is_of_all,
                device=self.device,
            )
        if ends or self.gradient_state.sync_each_batch or not self.world.is_distributed:
            yield
            return
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(self.no_sync(model))
            yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep gradients local within the block."""
        with self.strategy.no_sync(model):
            yield

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Average gradients in this backward although the forward ran inside `no_sync`."""
        with self.strategy.sync_in_backward(model):
            yield

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Weigh the loss for its window, scale it for fp16, and compute gradients."""
        if not self._models and (self.world.is_distributed or not self._optimizers):
            raise NotPreparedError(
                "backward was called before any model was prepared", fix="call accelerator.prepare(model, ...) first"
            )
        self._last_loss = loss.detach() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
        self._backwards += 1
        if self.world.debug or (self.layout is not None and self.layout.debug):
            check_agreement(self.world.with_debug(), f"backward number {self._backwards}", self._last_loss)
        loss = self._item_mean.weigh(loss, self.gradient_state.num_steps)
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if not self.world.is_distributed:
            loss.backward(**kwargs)
            return
        with naming_the_lost(f"averaging gradients in backward number {self._backwards}"):
            loss.backward(**kwargs)

    def _loss_factor(self) -> float:
        """What a loss will be multiplied by before backward: pipelines want to know it beforehand."""
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        return float(self._item_mean.weight(self.gradient_state.num_steps)) * scale

    def lomo_backward(self, loss: Any, learning_rate: float) -> None:
        """Not here: LOMO fuses the step into backward, which leaves nothing to average or to clip."""
        raise OptionError("LOMO's fused backward is not supported", fix="use backward and optimizer.step")

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo the scaling of fp16 gradients, once per step; clipping does it by itself."""
        if self.scaler is None:
            return
        wanted = self._optimizers if optimizer is None else optimizer
        for one in wanted if isinstance(wanted, (list, tuple)) else [wanted]:
            inner = getattr(one, "optimizer", one)
            if not is_unscaled(self.scaler, inner):
                self.scaler.unscale_(inner)

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clip the norm of all gradients together, over every process and axis that holds a part of them.

        With `error_if_nonfinite` a norm that is not a number stops all processes, naming the rank that it came from.
        """
        self.unscale_gradients()
        norm = clipping.clip_grad_norm(parameters, max_norm, norm_type, self.meshes)
        if error_if_nonfinite:
            check_finite(self._models, norm, loss=self._last_loss)
        return norm

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient's values."""
        self.unscale_gradients()
        nn.utils.clip_grad_value_(stepped_on(parameters), clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer's last step did nothing because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Train until the last process runs out of data; those that ran out before shadow the others' collectives."""
        with uneven.joined(self, joinables, even_batches):
            yield

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Compute in this run's precision within the block."""
        with autocast_context(self.mixed_precision, self.device, autocast_handler or self.autocast_handler):
            yield

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Profile the block; each process writes its trace into `output_trace_dir`."""
        from piledriver.accelerator.profiling import profiled

        with profiled(self, profile_handler or self.profile_handler or ProfileKwargs()) as profiler:
            yield profiler

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Nothing to split: there is no context axis in this layout."""
        yield

    # Other processes.

    def gather(self, tensor: Any) -> Any:
        """Every process's tensors, joined along the first dimension."""
        return gather(self.world, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The same without samples that only fill up the last batch."""
        some = self.meshes is not None and self.meshes.copies_of_batch > 1
        readers = self.meshes.readers if some and self.meshes is not None else None
        return gather_for_metrics(self.world, self.gradient_state, input_data, use_gather_object, readers)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over processes; those that read the same batch (tensor axis and others) count as one."""
        if reduction == "sum" and self.meshes is not None:
            scale /= self.meshes.copies_of_batch
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

    # Models in and out.

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The user's module; ours puts nothing around it, other libraries may have."""
        return unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The model's weights under its own keys."""
        inner = self.unwrap_model(model) if unwrap else model
        return inner.state_dict() if self.meshes is None else whole_state(inner, self.meshes)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save something once per run (or per node where `save_on_each_node`)."""
        from piledriver.accelerator.files import save_object

        writes = self.is_local_main_process if self.project_configuration.save_on_each_node else self.is_main_process
        if writes:
            save_object(obj, f, safe_serialization)

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """Save weights as Hugging Face does: safetensors, in shards with an index where they are large."""
        from piledriver.accelerator.files import save_model_files

        if self.meshes is not None and self.meshes.layout.pp > 1:
            # Each rank has other weights: bring them together, so that all see the same.
            model = whole_state(self.unwrap_model(model), self.meshes)
        save_model_files(model, save_directory, max_shard_size, safe_serialization)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these with `save_state` and `load_state` too."""
        self._saver.register(*objects)

    @property
    def _custom_objects(self) -> list[Any]:
        return self._saver.custom

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Called as `hook(models, weights, folder)` before `save_state`."""
        return self._saver.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Called as `hook(models, folder)` before `load_state`."""
        return self._saver.add_load_hook(hook)

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, asynchronous: bool = False, **_: Any
    ) -> str:
        """Save everything prepared, random generators and registered objects; returns the folder.

        The format is ours whatever `safe_serialization` says: nothing in it is a pickle. With `asynchronous` the loop
        waits only for the copy to host memory; an interrupted save is never taken for a good one.
        """
        return self._saver.save(self, None if output_dir is None else str(output_dir), asynchronous=asynchronous)

    def load_state(self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **options: Any) -> Any:
        """Load what `save_state` saved, on any number of processes; reads Accelerate's folders too."""
        location = options.pop("map_location", None)
        if location not in (None, "cpu", "on_device"):
            raise TypeError("Unsupported optimizer map location passed, choose one of `None`, `on_device`, `cpu`")
        return self._saver.load(self, None if input_dir is None else str(input_dir), strict=options.get("strict", True))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The same loader without its first batches, which are not read."""
        from piledriver.data import skip_first_batches

        return skip_first_batches(dataloader, num_batches)

    # Trackers.

    @property
    def trackers(self) -> list[Any]:
        """The trackers that were started."""
        return self._tracking.started

    @property
    def log_with(self) -> list[Any]:
        """The trackers that were asked for."""
        return self._tracking.wanted

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Start the trackers of `log_with`, on the main process."""
        self._tracking.start(self.world, project_name, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """One tracker by name; with `unwrap` the library's own object."""
        return self._tracking.get(self.world, name, unwrap)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log values to every tracker, on the main process."""
        self._tracking.log(values, step, log_kwargs or {})

    def end_training(self) -> None:
        """Finish what is being saved, close the trackers, leave the process group."""
        self._saver.close()
        self._tracking.finish()
        disconnect()

    # Memory.

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything prepared: `model, optimizer = accelerator.free_memory(model, optimizer)`."""
        for model in self._models:
            self.strategy.release(model)
        for kept in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            kept.clear()
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
