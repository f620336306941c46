"""The Accelerator's properties that only repeat what it was told, under Accelerate's names."""

from __future__ import annotations

from typing import Any

from piledriver.accelerator.facts import ProcessFacts
from piledriver.accelerator.options import DataLoaderConfiguration, ProjectConfiguration


class Answers(ProcessFacts):
    """What was asked for, and what follows from there being one copy of the model per process."""

    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    _mixed_precision: str

    @property
    def mixed_precision(self) -> str:
        """The precision that prepared models compute in: no, fp16, bf16 or fp8."""
        return self._mixed_precision

    @property
    def multi_device(self) -> bool:
        """Whether several processes with an accelerator each train together."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether only the main process reads."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the end of the data is filled up so that all processes take the same number of batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether loaders shuffle by (seed, epoch)."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device while the loop goes on."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether torchdata's stateful loader does the work."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        """The folder of the run."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder of the trackers."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatic checkpoint."""
        return self.project_configuration.iteration

    @property
    def parallelism_config(self) -> Any:
        """None: layouts come with the engine."""
        return None

    @property
    def torch_device_mesh(self) -> Any:
        """None where there is one copy of the model per process."""
        return None

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded."""
        return False

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether parameters are sharded over a mesh."""
        return False

    @property
    def fp8_backend(self) -> Any:
        """None: fp8 comes with the engine."""
        return None

    @property
    def deepspeed_plugin(self) -> Any:
        """None: one engine does what its stages do."""
        return None

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes a whole model."""
        return self.is_main_process

    @property
    def tensor_parallel_rank(self) -> int:
        """Place on the tensor axis."""
        return 0

    @property
    def pipeline_parallel_rank(self) -> int:
        """Place on the pipeline axis."""
        return 0

    @property
    def context_parallel_rank(self) -> int:
        """Place on the context axis."""
        return 0

    @property
    def data_parallel_rank(self) -> int:
        """Place on the data axis: every process is a replica."""
        return self.process_index

    @property
    def data_parallel_shard_rank(self) -> int:
        """Place on the sharding axis."""
        return 0
