"""Handlers and configurations with the names, defaults and meaning of Hugging Face Accelerate's.

These dataclasses are mutable, unlike our own configs, because loops written for Accelerate change them later.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch

from piledriver.engine.options import DDPOptions
from piledriver.runtime import environment


class _NamedEnumType(enum.EnumMeta):
    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class NamedEnum(enum.Enum, metaclass=_NamedEnumType):
    """Base of enumerations with a test for membership by value."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        """Return every value."""
        return [member.value for member in cls]


class DistributedType(str, enum.Enum):  # noqa: UP042  (str() of a member must be as in Accelerate)
    """Kinds of processes that train together."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


class PrecisionType(str, NamedEnum):
    """Precisions that a model computes in."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(NamedEnum):
    """Random generators that can be synchronised."""

    TORCH = "torch"
    CUDA = "cuda"
    XLA = "xla"
    XPU = "xpu"
    MPS = "mps"
    NUMPY = "numpy"
    PYTHON = "python"
    GENERATOR = "generator"


class DDPCommunicationHookType(NamedEnum):
    """Compressions of gradients between processes."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class DynamoBackend(str, NamedEnum):
    """Compilers that torch.compile can use."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class KwargsHandler:
    """Base of torch's options; `to_kwargs` returns those that differ from the defaults."""

    def to_dict(self) -> dict[str, Any]:
        """Return all options."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options that were changed, so that torch's defaults apply to the rest."""
        defaults = type(self)().to_dict()
        return {key: value for key, value in self.to_dict().items() if defaults[key] != value}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of `torch.autocast`."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of `torch.amp.GradScaler`."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of gradient averaging over replicas (those of torch's DistributedDataParallel)."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_dict(
        self, ignore_keys: Iterable[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return the options of the constructor; the hook is registered afterwards."""
        return {key: value for key, value in super().to_dict().items() if key not in ignore_keys}

    def to_engine(self) -> DDPOptions:
        """Return the engine's options."""
        return DDPOptions(
            arguments=self.to_kwargs(),
            hook=self.comm_hook.value,
            wrapper=cast(Any, self.comm_wrapper.value),
            hook_state=self.comm_state_option,
        )


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of the process group; a timeout of None is torch's default."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of `torch.profiler.profile`."""

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None
    report: bool = False
    """Gather one report of all ranks after each cycle (ours; not in Accelerate)."""

    def build(self) -> torch.profiler.profile:
        """Return the profiler."""
        return torch.profiler.profile(**self.build_arguments())

    def build_arguments(self) -> dict[str, Any]:
        """Return the arguments of `torch.profiler.profile`."""
        known = {
            "cpu": torch.profiler.ProfilerActivity.CPU,
            "cuda": torch.profiler.ProfilerActivity.CUDA,
            "xpu": torch.profiler.ProfilerActivity.XPU,
            "mtia": torch.profiler.ProfilerActivity.MTIA,
        }
        for name in self.activities or ():
            if name not in known:
                raise ValueError(f"unknown profiler activity {name!r}: choose from {', '.join(known)}")
        schedule = torch.profiler.schedule(**self.schedule_option) if self.schedule_option else None
        return {
            "activities": [known[name] for name in self.activities] if self.activities else None,
            "schedule": schedule,
            "on_trace_ready": self.on_trace_ready,
            "record_shapes": self.record_shapes,
            "profile_memory": self.profile_memory,
            "with_stack": self.with_stack,
            "with_flops": self.with_flops,
            "with_modules": self.with_modules,
        }


@dataclass
class DataLoaderConfiguration:
    """Sharding of data loaders over ranks; see `data.prepare_data_loader`."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration:
    """Folders of a run, and the number of checkpoints to keep."""

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project folder, and the logging folder if it is not set."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Accumulation of gradients over several batches before a step."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of torch.compile. Ours compiles in place, so that keys of the state dict do not change."""

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        environ = environment.snapshot()
        prefix = "ACCELERATE_DYNAMO_"
        backend = self.backend if self.backend is not None else environ.get(prefix + "BACKEND", "no")
        self.backend = DynamoBackend(str(getattr(backend, "value", backend)).upper())
        if self.mode is None:
            self.mode = environ.get(prefix + "MODE", "default")
        for name in ("fullgraph", "use_regional_compilation"):
            if getattr(self, name) is None:
                setattr(self, name, environment.parse_bool(environ.get(prefix + f"USE_{name.upper()}", "false")))
        if self.dynamic is None and environ.get(prefix + "USE_DYNAMIC") is not None:
            self.dynamic = environment.parse_bool(environ[prefix + "USE_DYNAMIC"])

    def to_dict(self) -> dict[str, Any]:
        """Return all options, with the backend's name as torch spells it."""
        options = copy.deepcopy(self.__dict__)
        options["backend"] = str(getattr(self.backend, "value", self.backend)).lower()
        return options

    @property
    def compiles(self) -> str | None:
        """Return the layout's `compile`: "blocks", "model", or None."""
        if self.backend == DynamoBackend.NO or self.disable:
            return None
        return "blocks" if self.use_regional_compilation else "model"

    def to_kwargs(self) -> dict[str, Any]:
        """Return what torch.compile takes."""
        plain = self._plain()
        changed = {key: value for key, value in self.to_dict().items() if plain[key] != value}
        changed.pop("use_regional_compilation", None)
        return changed

    @staticmethod
    def _plain() -> dict[str, Any]:
        # Against the built-in defaults, not against a plugin built now: that one would read the same environment.
        return {
            "backend": "no",
            "mode": "default",
            "fullgraph": False,
            "dynamic": None,
            "options": None,
            "disable": False,
            "use_regional_compilation": False,
        }
