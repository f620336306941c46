"""`accelerate.accelerator`: our `Accelerator` with Accelerate's shared states."""

from __future__ import annotations

import functools
import logging
from typing import Any

from piledriver.accelerator.accelerator import Accelerator as _Accelerator
from piledriver.accelerator.options.handlers import (
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from piledriver.accelerator.tracking import Trackers
from piledriver.compat.accelerate.parallelism_config import ParallelismConfig
from piledriver.compat.accelerate.state import AcceleratorState, GradientState, PartialState, RankOutlivesReset
from piledriver.compat.accelerate.utils.imports import is_bitsandbytes_multi_backend_available, is_xpu_available
from piledriver.engine import state as engine_state
from piledriver.engine.layout import Layout
from piledriver.runtime import environment
from piledriver.runtime.world import World

# The name that Accelerate's users configure.
logger = logging.getLogger("accelerate.accelerator")

# "once": one scheduler step per optimizer step, as piledriver's own Accelerator; default: one per process.
SCHEDULER_STEPS = "PILEDRIVER_ACCELERATE_SCHEDULER"


class Accelerator(RankOutlivesReset, _Accelerator):
    """`piledriver.Accelerator` whose world, precision and gradient state are shared by all instances of a program."""

    def _enter_world(
        self, cpu: bool, process_group: InitProcessGroupKwargs | None, precision: Any, world: World | None
    ) -> None:
        options: dict[str, Any] = {}
        if process_group is not None:
            options["timeout"] = process_group.timeout
        self.state: AcceleratorState = AcceleratorState(
            mixed_precision=precision, cpu=cpu, _from_accelerator=True, **options
        )

    def _default_plugins(self, layout: Layout | None, fsdp: Any, parallelism: Any) -> tuple[Any, Any]:
        """Return the plugins given or described by the environment, and record them where Accelerate's users look."""
        fsdp, parallelism = super()._default_plugins(layout, fsdp, parallelism)
        wanted = environment.parse_bool(environment.snapshot().get("ACCELERATE_USE_PARALLELISM_CONFIG", ""))
        if parallelism is None and layout is None and wanted:
            parallelism = ParallelismConfig()
        if fsdp is not None:
            self.state.set_fsdp_plugin(fsdp)
        return fsdp, parallelism

    def _make_gradient_state(self, plugin: GradientAccumulationPlugin) -> GradientState:
        return GradientState(plugin)

    def _make_trackers(self, log_with: Any) -> Trackers:
        from piledriver.compat.accelerate.tracking import registered_classes

        return Trackers(log_with, self.logging_dir, registered_classes())

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """Save the model; offloaded weights are loaded module by module."""
        from piledriver.serve.placement.load_checkpoint import get_state_dict_offloaded_model
        from piledriver.serve.placement.tensors import has_offloaded_params

        held = get_state_dict_offloaded_model(model) if any(map(has_offloaded_params, model.modules())) else model
        super().save_model(held, save_directory, max_shard_size, safe_serialization)

    @property
    def saves_alone(self) -> bool:  # type: ignore[override]
        """Return whether the main process may call `save_state` without the others, as diffusers' scripts do.

        It may where every rank has the whole model and optimizer. Sharded ones need all ranks, as in Accelerate.
        """
        replicated = self.layout.zero == 0 and self.layout.ep == 1 and self.mesh.model_parallel_size == 1
        return self.use_distributed and replicated

    def load_state(self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **options: Any) -> Any:
        """Load a checkpoint; warn that loaders continue at their saved batch, which Accelerate does not restore."""
        report = super().load_state(input_dir, load_kwargs, **options)
        entries = [getattr(loader, "_entry", None) or {} for loader in self._dataloaders]
        if any(entry.get("batches") for entry in entries) and self.is_main_process:
            logger.warning(
                "load_state restored the position of the data loader: iterating over it starts there. "
                "skip_first_batches counts from the start of the epoch; do not skip batches in the loop yourself"
            )
        return report

    @property
    def world(self) -> World:  # type: ignore[override]
        """Return the world of the shared state."""
        return self.state.world

    @property
    def mixed_precision(self) -> str:
        """Return the precision of the shared state."""
        return self.state.mixed_precision

    @property
    def scheduler_steps_per_optimizer_step(self) -> int:  # type: ignore[override]
        """Return the world size, as in Accelerate, or 1 if the environment asks for one step per optimizer step."""
        found = environment.snapshot().get(SCHEDULER_STEPS, "per_process")
        return 1 if found == "once" else self.num_processes

    @property
    def distributed_type(self) -> Any:
        return self.state.distributed_type

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader. A stateful one draws the order of its first epoch now, as in Accelerate."""
        loader = super().prepare_data_loader(data_loader, *args, **kwargs)
        if getattr(loader, "use_stateful_dataloader", False):
            loader.base_dataloader.state_dict()
        return loader

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a model; of several ranks it has a method `no_sync`, as Accelerate's wrapper does."""
        model = super().prepare_model(model, *args, **kwargs)
        if self.use_distributed and not hasattr(model, "no_sync"):
            model.no_sync = functools.partial(engine_state.no_sync, model)
        return model
