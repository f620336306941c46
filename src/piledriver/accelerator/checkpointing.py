"""The Accelerator's verbs for weights, checkpoints and trackers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from piledriver.accelerator.saving.state_saver import StateSaver
from piledriver.accelerator.state.properties import AcceleratorProperties
from piledriver.accelerator.tracking import Trackers
from piledriver.accelerator.unwrap import unwrap_module
from piledriver.engine.shards import gather_stages, gather_state_dict
from piledriver.runtime.connection import disconnect


class CheckpointMixin(AcceleratorProperties):
    """Models in and out, `save_state` and `load_state`, trackers."""

    _saver: StateSaver
    _tracking: Trackers
    saves_alone = False
    """Whether rank 0 saves without waiting for other ranks; else `save_state` is called by all of them."""

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the user's module, without wrappers of other libraries; `prepare` adds none."""
        return unwrap_module(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the model's full weights under its own keys, on every rank."""
        return gather_state_dict(self.unwrap_model(model) if unwrap else model, self.mesh)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object on rank 0, or on local rank 0 of each node with `save_on_each_node`."""
        from piledriver.accelerator.saving.files import save_object

        writes = self.is_local_main_process if self.project_configuration.save_on_each_node else self.is_main_process
        if writes:
            save_object(obj, f, safe_serialization)

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """Save weights in Hugging Face's format: safetensors, in shards with an index if they are large."""
        from piledriver.accelerator.saving.files import save_model_files

        model = gather_stages(self.unwrap_model(model), self.mesh)
        save_model_files(model, save_directory, max_shard_size, safe_serialization)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects in `save_state` and `load_state`."""
        self._saver.register(*objects)

    @property
    def _custom_objects(self) -> list[Any]:
        return self._saver.custom

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call `hook(models, weights, folder)` before `save_state`; return a handle that removes it."""
        return self._saver.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call `hook(models, folder)` before `load_state`; return a handle that removes it."""
        return self._saver.add_load_hook(hook)

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, asynchronous: bool = False, **_: Any
    ) -> str:
        """Save everything prepared, random generators and registered objects; return the folder.

        The format is piledriver's whatever `safe_serialization` says: it holds no pickles. With `asynchronous` the loop
        waits only for the copy to host memory. An interrupted save is never loaded.
        """
        folder = None if output_dir is None else str(output_dir)
        return self._saver.save(
            self._prepared, self.project_configuration, folder, asynchronous=asynchronous, alone=self.saves_alone
        )

    def load_state(self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **options: Any) -> Any:
        """Load what `save_state` saved, on any number of processes, or a folder of Accelerate's."""
        location = options.pop("map_location", None)
        if location not in (None, "cpu", "on_device"):
            raise TypeError("Unsupported optimizer map location passed, choose one of `None`, `on_device`, `cpu`")
        folder = None if input_dir is None else str(input_dir)
        return self._saver.load(self._prepared, self.project_configuration, folder, strict=options.get("strict", True))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the loader without its first batches, which are not read."""
        from piledriver.data import skip_first_batches

        return skip_first_batches(dataloader, num_batches)

    # Trackers.

    @property
    def trackers(self) -> list[Any]:
        """Return the started trackers."""
        return list(self._tracking.hub.trackers)

    @property
    def log_with(self) -> list[Any]:
        """Return the requested trackers."""
        return self._tracking.wanted

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Start the trackers of `log_with`, on the main process."""
        self._tracking.start(self.world, project_name, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name; with `unwrap` the library's own object."""
        return self._tracking.get(self.world, name, unwrap)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log values to every tracker, on the main process."""
        self._tracking.hub.log(values, step, log_kwargs or {})

    def end_training(self) -> None:
        """Finish a pending save, close the trackers, destroy the process group."""
        self._saver.close()
        self._tracking.hub.finish()
        disconnect()
