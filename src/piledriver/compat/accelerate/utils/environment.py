"""`accelerate.utils.environment`: environment variables and device probes."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from piledriver.runtime import environment
from piledriver.runtime.environment import cleared as clear_environment
from piledriver.runtime.environment import patched as patch_environment
from piledriver.runtime.errors import WorldError

logger = logging.getLogger("accelerate.utils.environment")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 or 0 for yes, true, on, no, false, off and the like."""
    try:
        found = environment.parse_bool(value)
    except WorldError:
        raise ValueError(f"invalid truth value {value}") from None
    if not value.strip():
        raise ValueError(f"invalid truth value {value}")
    return found if to_bool else int(found)


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """Return the first of several variables that holds a non-negative number, or the default."""
    environ = environment.snapshot()
    for key in env_keys:
        value = int(environ.get(key, -1))
        if value >= 0:
            return value
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return a variable as a flag."""
    return bool(str_to_bool(environment.snapshot().get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return a variable as text."""
    return environment.snapshot().get(key, str(default))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return the libraries that are imported."""
    import sys

    return [name for name in library_names if name in sys.modules]


def convert_dict_to_env_variables(current_env: dict[str, Any]) -> list[str]:
    """Return lines `NAME=value`; skip those that a shell would misread."""
    forbidden = (";", "\n", "<", ">", " ")
    lines = []
    for key, value in current_env.items():
        if all(char not in (key + str(value)) for char in forbidden) and len(key) >= 1 and len(str(value)) >= 1:
            lines.append(f"{key}={value}\n")
        else:
            logger.warning("WARNING: Skipping %s=%s as it contains forbidden characters or missing values.", key, value)
    return lines


def get_current_device_type() -> tuple[str, str]:
    """Return Accelerate's distributed type for this machine, and its device type."""
    from piledriver.runtime.hardware import find_hardware

    kind = find_hardware().best()
    return {"cuda": "MULTI_GPU", "xpu": "MULTI_XPU", "mps": "MPS"}.get(kind, "MULTI_CPU"), kind


def get_gpu_info() -> tuple[list[str], int]:
    """Return names and number of CUDA devices."""
    import torch

    count = torch.cuda.device_count()
    return [torch.cuda.get_device_name(index) for index in range(count)], count


def check_cuda_p2p_ib_support() -> bool:
    """Return whether devices reach each other directly; RTX 40 cards do not."""
    names, count = get_gpu_info()
    return not (count > 1 and any(name.startswith("NVIDIA GeForce RTX 40") for name in names))


def check_cuda_fp8_capability() -> bool:
    """Return whether the device computes in fp8."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def get_cpu_distributed_information() -> Any:
    """Return the world of this process, on the CPU."""
    from piledriver.runtime.world import detect_world

    return detect_world(device="cpu")


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores near its device."""
    from piledriver.runtime.launch.numa import bind_to_near_cores

    bind_to_near_cores()


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function, or the tests of a class, to restore ACCELERATE_ variables afterwards."""
    if inspect.isclass(func_or_cls):
        return _purge_class(func_or_cls)
    return _purge_function(func_or_cls)


@contextmanager
def _restored() -> Any:
    def ours() -> dict[str, str]:
        return {key: value for key, value in environment.snapshot().items() if key.startswith("ACCELERATE_")}

    before = ours()
    try:
        yield
    finally:
        environment.unset(set(ours()) - set(before))
        environment.update(before)


def _purge_function(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def later(*args: Any, **kwargs: Any) -> Any:
            with _restored():
                return await function(*args, **kwargs)

        return later

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _restored():
            return function(*args, **kwargs)

    return call


def _purge_class(cls: Any) -> Any:
    _wrap_tests(cls)
    inherited = cls.__init_subclass__

    def also_in_subclasses(subclass: Any, /, **kwargs: Any) -> None:
        inherited(**kwargs)
        _wrap_tests(subclass)

    cls.__init_subclass__ = classmethod(also_in_subclasses)
    return cls


def _wrap_tests(cls: Any) -> None:
    for name, attribute in list(vars(cls).items()):
        if callable(attribute) and name.startswith("test"):
            setattr(cls, name, _purge_function(attribute))
