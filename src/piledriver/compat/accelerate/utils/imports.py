"""`accelerate.utils.imports`: probes of installed packages and of this machine."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch


def _installed(module: str, distribution: str | None = None) -> bool:
    """Return whether a package can be imported; with a distribution's name, whether that one provides it."""
    if importlib.util.find_spec(module) is None:
        return False
    try:
        metadata.metadata(distribution or module)
    except metadata.PackageNotFoundError:
        return False
    return True


# Module and distribution of the packages that have other names than their probe.
_SPELLED = {
    "lomo": ("lomo_optim", "lomo-optim"),
    "msamp": ("msamp", "ms-amp"),
    "pynvml": ("pynvml", "nvidia-ml-py"),
    "transformer_engine": ("transformer_engine", "transformer-engine"),
}


def __getattr__(name: str) -> Callable[[], bool]:
    """Return the probe `is_<package>_available` of any package that no function below probes."""
    package = name.removeprefix("is_").removesuffix("_available")
    if not package or name != f"is_{package}_available":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return functools.partial(_installed, *_SPELLED.get(package, (package,)))


def is_tensorboard_available() -> bool:
    """Return whether TensorBoard or tensorboardX is installed."""
    return _installed("tensorboard") or _installed("tensorboardX")


def is_mlflow_available() -> bool:
    """Return whether MLflow or its skinny build is installed."""
    return _installed("mlflow") or _installed("mlflow", "mlflow-skinny")


def is_rich_available() -> bool:
    """Return whether to format tracebacks with rich: never."""
    return False


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether torchdata has its stateful loader."""
    return _installed("torchdata") and importlib.util.find_spec("torchdata.stateful_dataloader") is not None


def is_torch_distributed_available() -> bool:
    """Return whether torch was built with distributed support."""
    return torch.distributed.is_available()


def is_cuda_available() -> bool:
    """Return whether there is a CUDA device."""
    return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Return whether the CUDA device is an AMD GPU."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether there is an Apple GPU."""
    return torch.backends.mps.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Return whether there is an Intel GPU."""
    return hasattr(torch, "xpu") and torch.xpu.is_available()


def is_xccl_available() -> bool:
    """Return whether there is a collective backend for Intel GPUs."""
    return bool(getattr(torch.distributed, "is_xccl_available", lambda: False)())


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed and told which device to use."""
    from piledriver.runtime.hardware import find_hardware

    return find_hardware().xla > 0


def _absent(name: str) -> Callable[..., bool]:
    def probe(*args: Any, **kwargs: Any) -> bool:
        return False

    probe.__doc__ = f"Return False: {name} is not supported."
    return probe


is_habana_gaudi1 = _absent("Gaudi")
is_hpu_available = _absent("Gaudi")
is_megatron_lm_available = _absent("Megatron-LM")
is_mlu_available = _absent("Cambricon")
is_musa_available = _absent("Moore Threads")
is_neuron_available = _absent("Neuron")
is_npu_available = _absent("Ascend")
is_sdaa_available = _absent("Teco")
is_pippy_available = _absent("pipeline inference")
is_transformer_engine_mxfp8_available = _absent("Transformer Engine")


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the device computes in bfloat16; every CPU does."""
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True


def is_fp16_available() -> bool:
    """Return whether the device trains in float16: only accelerators do."""
    return torch.cuda.is_available() or is_xpu_available() or is_mps_available()


def is_fp8_available() -> bool:
    """Return whether a library for fp8 is installed."""
    return any(map(_installed, ("torchao", "transformer_engine", "msamp"), (None, "transformer-engine", "ms-amp")))


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed."""
    if not _installed("bitsandbytes"):
        return False
    if min_version is None:
        return True
    from piledriver.compat.accelerate.utils.versions import compare_versions

    return compare_versions("bitsandbytes", ">=", min_version)


is_4bit_bnb_available = functools.partial(is_bnb_available, "0.39.0")
is_8bit_bnb_available = functools.partial(is_bnb_available, "0.37.2")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes works on more than CUDA."""
    return is_bnb_available("0.45.0")


def is_weights_only_available() -> bool:
    """Return whether torch can load without executing: it always can."""
    return True


def _required(package: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _installed(package):
                raise ImportError(f"{package} is not available, please install it before using {function.__name__}")
            return function(*args, **kwargs)

        return call

    return decorate


torchao_required = _required("torchao")
deepspeed_required = _required("deepspeed")
