"""The Accelerator's settings and its place in the mesh, as read-only properties under Accelerate's names."""

from __future__ import annotations

from typing import Any

from torch import nn

from piledriver.accelerator.options.handlers import DataLoaderConfiguration, ProjectConfiguration
from piledriver.accelerator.state.prepared import Prepared
from piledriver.accelerator.state.process_info import ProcessInfo
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import Mesh


class AcceleratorProperties(ProcessInfo):
    """Settings of an Accelerator, and this rank's place in its mesh."""

    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    _prepared: Prepared
    _mixed_precision: str

    @property
    def mesh(self) -> Mesh:
        """Return the device mesh of the layout, with this rank's place in it."""
        return self._prepared.mesh

    @property
    def layout(self) -> Layout:
        """Return the layout with every size resolved."""
        return self._prepared.mesh.layout

    @property
    def _models(self) -> list[nn.Module]:
        return self._prepared.models

    @property
    def _optimizers(self) -> list[Any]:
        return self._prepared.optimizers

    @property
    def _schedulers(self) -> list[Any]:
        return self._prepared.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self._prepared.loaders

    @property
    def mixed_precision(self) -> str:
        """Return the precision that prepared models compute in: no, fp16, bf16 or fp8."""
        return self._mixed_precision

    @property
    def multi_device(self) -> bool:
        """Return whether several processes train on one accelerator each."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def split_batches(self) -> bool:
        """Return whether a loader's batch size is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Return whether only rank 0 reads and sends the others their batches."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Return whether the last batches are padded so that all ranks get the same number."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Return whether loaders shuffle by (seed, epoch)."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Return whether batches are copied to the device asynchronously."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Return whether torchdata's stateful loader reads."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Return the number of the next automatic checkpoint."""
        return self.project_configuration.iteration

    @property
    def parallelism_config(self) -> Any:
        return None

    @property
    def torch_device_mesh(self) -> Any:
        """Return the (pp, dp_replicate, dp_shard, cp, tp) mesh; None for a single process and for torch DDP."""
        return self.mesh.batch

    @property
    def is_fsdp2(self) -> bool:
        return self.layout.zero == 3

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        return self.is_fsdp2

    @property
    def fp8_backend(self) -> Any:
        """Return "ENGINE" if the engine's layers compute in fp8, else None."""
        return "ENGINE" if self.layout.precision.startswith("fp8") else None

    @property
    def fp8_recipe_handler(self) -> Any:
        """Return None: `Layout(precision="fp8")` needs no recipe of another library."""
        return None

    @property
    def deepspeed_plugin(self) -> Any:
        """Return None: `Layout(zero=...)` covers its stages."""
        return None

    @property
    def should_save_model(self) -> bool:
        """Return whether this rank writes full models."""
        return self.is_main_process

    @property
    def tensor_parallel_rank(self) -> int:
        return self.mesh.axis_rank("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        return self.mesh.axis_rank("pp")

    @property
    def context_parallel_rank(self) -> int:
        return self.mesh.axis_rank("cp")

    @property
    def data_parallel_rank(self) -> int:
        """Return which of the batches of a step this rank reads."""
        return self.mesh.data_rank

    @property
    def data_parallel_shard_rank(self) -> int:
        return self.mesh.axis_rank("dp_shard")
