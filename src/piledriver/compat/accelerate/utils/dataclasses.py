"""Options and enumerations. Those of DeepSpeed and Megatron are names only: `Accelerator` refuses them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from piledriver.accelerator.options.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    NamedEnum,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
)
from piledriver.runtime import environment

BaseEnum = NamedEnum

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "BaseEnum",
    "BnbQuantizationConfig",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TERecipeKwargs",
    "TensorInformation",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
]


class LoggerType(NamedEnum):
    """Trackers by name."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class ComputeEnvironment(enum.StrEnum):
    """Where a job runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(enum.StrEnum):
    """How a SageMaker job is split."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class CustomDtype(enum.Enum):
    """Types that torch has no name for."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


@dataclass
class TensorInformation:
    """Shape and type of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


class _Given:
    """Keeps what it was given, so that scripts which build one still run up to where it would matter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = args
        self.__dict__.update(kwargs)


class AORecipeKwargs(_Given, KwargsHandler):
    """fp8 by torchao."""


class TERecipeKwargs(_Given, KwargsHandler):
    """fp8 by Transformer Engine."""


class MSAMPRecipeKwargs(_Given, KwargsHandler):
    """fp8 by MS-AMP."""


class FP8RecipeKwargs(_Given, KwargsHandler):
    """fp8 by any of them."""


class DeepSpeedPlugin(_Given):
    """DeepSpeed's stages; the engine's zero stages do what they do."""


class DeepSpeedSequenceParallelConfig(_Given):
    """DeepSpeed's sequence parallelism."""


class FullyShardedDataParallelPlugin:
    """FSDP, which `Accelerator` reads as a `Layout`. What is not given comes from what `accelerate launch` has set."""

    _from_environment: ClassVar[dict[str, str]] = {
        "fsdp_version": "FSDP_VERSION",
        "sharding_strategy": "FSDP_SHARDING_STRATEGY",
        "reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
        "cpu_offload": "FSDP_OFFLOAD_PARAMS",
        "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
        "forward_prefetch": "FSDP_FORWARD_PREFETCH",
    }

    def __init__(self, **options: Any) -> None:
        environ = environment.snapshot()
        for name, variable in self._from_environment.items():
            setattr(self, name, environ.get(variable))
        self.__dict__.update(options)


class MegatronLMPlugin(_Given):
    """Megatron-LM; the engine's tensor and pipeline axes do what it does."""


class BnbQuantizationConfig(_Given):
    """Quantisation by bitsandbytes."""


@dataclass
class TorchContextParallelConfig:
    """How context parallelism communicates."""

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        self.cp_comm_strategy = self.cp_comm_strategy or "allgather"
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ValueError(f"Invalid cp_comm_strategy: {self.cp_comm_strategy}. Must be 'allgather' or 'alltoall'.")


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism."""

    enable_async_tp: bool = False


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism, in the older spelling."""

    tp_size: int = 1
    torch_device_mesh: Any = field(default=None)
