"""`accelerate.utils.dataclasses`: options and enumerations. `Accelerator` rejects those of DeepSpeed and Megatron."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

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
from piledriver.accelerator.options.plugins import FullyShardedDataParallelPlugin

BaseEnum = NamedEnum


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
    """The environment of a job."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(enum.StrEnum):
    """The distribution of a SageMaker job."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class CustomDtype(enum.Enum):
    """Types that torch does not have."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


@dataclass
class TensorInformation:
    """Shape and type of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


class _Given:
    """Keeps its arguments, so that a script may build one; `Accelerator` rejects it."""

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
    """DeepSpeed options; use `Layout(zero=...)`."""


class DeepSpeedSequenceParallelConfig(_Given):
    """DeepSpeed's sequence parallelism; use `Layout(cp=...)`."""


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type[torch.nn.Module] | None:
    """Return the class of the first module below `module` whose class has this name."""
    return next((type(one) for one in module.modules() if type(one).__name__ == name), None)


class MegatronLMPlugin(_Given):
    """Megatron-LM options; use `Layout(tp=..., pp=...)`."""


class BnbQuantizationConfig(_Given):
    """Quantisation by bitsandbytes."""


@dataclass
class TorchContextParallelConfig:
    """The communication of context parallelism."""

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
    """The older options of tensor parallelism."""

    tp_size: int = 1
    torch_device_mesh: Any = field(default=None)
