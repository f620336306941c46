"""`accelerate.utils.other`."""

from __future__ import annotations

import logging
import platform
import socket
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from piledriver.accelerator.saving.files import save_object, without_shared
from piledriver.accelerator.unwrap import unwrap_module
from piledriver.compat.accelerate.state import PartialState
from piledriver.engine.blocks import is_repeated, repeated_blocks

_log = logging.getLogger("accelerate.utils.other")


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the module inside wrappers; without `keep_fp32_wrapper`, with the forward that callers kept for it."""
    inner = unwrap_module(model, keep_fp32_wrapper, keep_torch_compile, recursive)
    original = None if keep_fp32_wrapper else vars(inner).pop("_original_forward", None)
    if original is not None:
        forward = inner.forward
        while forward != original and hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        inner.forward = forward
    return inner


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether this is the result of `torch.compile(module)`."""
    return isinstance(module, nn.Module) and "_orig_mod" in module._modules


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether submodules were compiled."""
    return any(is_compiled_module(child) for child in module.modules())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return whether this is a list of modules of one class."""
    return is_repeated(module)


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether the module contains a list of modules of one class."""
    return bool(repeated_blocks(module))


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a copy of the module, sharing its weights, whose repeated blocks are compiled."""
    if is_repeated_blocks(module):
        made = _twin(module)
        compiled_children: Any = {n: torch.compile(child, **compile_kwargs) for n, child in module._modules.items()}
        made._modules = compiled_children
        return made
    if has_repeated_blocks(module):
        made = _twin(module)
        made._modules = {
            name: compile_regions(child, **compile_kwargs) if child is not None else None
            for name, child in module._modules.items()
        }
        return made
    compiled: nn.Module = torch.compile(module, **compile_kwargs)  # type: ignore[assignment]
    return compiled


def _twin(module: nn.Module) -> nn.Module:
    """Return another module with the same attributes; bound methods among them are bound to it."""
    made = type(module).__new__(type(module))
    for name, value in module.__dict__.items():
        bound = isinstance(value, MethodType) and value.__self__ is module
        made.__dict__[name] = MethodType(value.__func__, made) if bound else value
    return made


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether parameters are DTensors."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_model_tp_size(model: nn.Module) -> Any:
    """Return the tensor-parallel size that a transformers model was loaded with."""
    size = getattr(model, "tp_size", None)
    if size is not None:
        return size
    spread = getattr(getattr(model, "config", None), "distributed_config", None)
    return spread.get("tp_size") if isinstance(spread, dict) else getattr(spread, "tp_size", None)


def wait_for_everyone() -> None:
    """Wait until all ranks have arrived."""
    PartialState().wait_for_everyone()


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict in which every tensor owns its memory."""
    return without_shared(state_dict)


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save once per run, or once per node."""
    state = PartialState()
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        save_object(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Load a file of `torch.save`, without executing pickled code."""
    return torch.load(f, map_location=map_location, weights_only=True, **kwargs)


def get_pretty_name(obj: Any) -> str:
    """Return the qualified name of an object or of its class."""
    if not hasattr(obj, "__qualname__") and not hasattr(obj, "__name__"):
        obj = getattr(obj, "__class__", obj)
    return str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or obj)


def merge_dicts(source: dict[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Merge one dictionary into another, recursively; return the latter."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a port of this machine is in use."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", int(port or 29500))) == 0


def get_free_port() -> int:
    """Return a port that is not in use."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def convert_bytes(size: float) -> str:
    """Return a size with its unit."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


def check_os_kernel() -> None:
    """Warn of Linux kernels on which processes hang."""
    info = platform.uname()
    if info.system != "Linux":
        return
    from piledriver.compat.accelerate.utils.versions import compare_versions

    release = info.release.split("-")[0]
    if compare_versions(_version(release), "<", "5.5.0"):
        _log.warning(
            f"Detected kernel version {release}, which is below the recommended minimum of 5.5.0; this can cause the "
            "process to hang. It is recommended to upgrade the kernel to the minimum version or higher."
        )


def _version(text: str) -> Any:
    from packaging.version import parse

    return parse(text)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute by its dotted name."""
    for part in attr.split("."):
        obj = getattr(obj, part)
    return obj


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return every module, innermost first."""
    named = list(model.named_modules())[::-1]
    return named if return_fqns else [module for _, module in named]


def write_basic_config(mixed_precision: str = "no", save_location: str | None = None) -> bool | Path:
    """Write the default launch config; return its path, or False where there is one."""
    from piledriver.core import config, storage
    from piledriver.runtime.launch.config import LaunchConfig, default_path

    path = Path(save_location) if save_location is not None else default_path()
    if path.exists():
        print(f"Configuration already exists at {path}, will not override.")
        return False
    storage.write_text(path, config.to_yaml(LaunchConfig(mixed_precision=mixed_precision)))  # type: ignore[arg-type]
    return path
