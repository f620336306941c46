"""Collectives and nested structures, with the world looked up from the shared state."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from piledriver.accelerator.options.handlers import DistributedType
from piledriver.compat.accelerate.state import PartialState
from piledriver.runtime.collectives import nested
from piledriver.runtime.collectives import operations as collectives
from piledriver.runtime.collectives.agreement import check_agreement
from piledriver.runtime.collectives.nested import find_device, listify, send_to_device
from piledriver.runtime.errors import DisagreementError

# Accelerate's debug mode raises this where ranks differ.
DistributedOperationException = DisagreementError


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor has no single length to pad to."""


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether this is a tensor."""
    return nested.is_tensor(tensor)


def is_namedtuple(data: Any) -> bool:
    """Return whether this is a named tuple."""
    return nested.is_named_tuple(data)


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether this describes a tensor."""
    from piledriver.compat.accelerate.utils.dataclasses import TensorInformation

    return isinstance(tensor_info, TensorInformation)


def honor_type(obj: Any, generator: Any) -> Any:
    """Return a sequence of the type of `obj`."""
    return nested.rebuild_sequence(obj, generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Call a function on every tensor in a nested structure."""
    return nested.map_tensors(func, data, *args, test=test_type, strict=error_on_other_type, **kwargs)


def get_data_structure(data: Any) -> Any:
    """Return shape and type of every tensor."""
    from piledriver.compat.accelerate.utils.dataclasses import TensorInformation

    return recursively_apply(lambda t: TensorInformation(shape=t.shape, dtype=t.dtype), data)


def get_shape(data: Any) -> Any:
    """Return the shape of every tensor, as lists."""
    return recursively_apply(lambda t: list(t.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return empty tensors of the shapes and types given."""
    return recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def find_batch_size(data: Any) -> int | None:
    """Return the length of the first tensor."""
    if isinstance(data, (tuple, list, Mapping)) and len(data) == 0:
        raise ValueError(f"Cannot find the batch size from empty {type(data)}.")
    if not isinstance(data, (tuple, list, Mapping, torch.Tensor)):
        raise TypeError(f"Can only find the batch size of tensors but got {type(data)}.")
    return nested.find_batch_size(data)


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the length of the first tensor, or None."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def gather(tensor: Any) -> Any:
    """Return the tensors of all ranks, concatenated."""
    return collectives.gather(PartialState().world, tensor)


def gather_object(object: Any) -> Any:
    """Return the lists of all ranks, concatenated."""
    world = PartialState().world
    if not world.is_distributed:
        return object
    return [item for part in collectives.gather_object(world, object) for item in part]


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return the tensors of one rank on all."""
    return collectives.broadcast(PartialState().world, tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Copy the list of one rank to all, in place; return it."""
    object_list[:] = collectives.broadcast_object(PartialState().world, list(object_list), from_process)
    return object_list


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return the tensor of the rank that has one, on all."""
    world = PartialState().world
    shapes = collectives.gather_object(world, None if tensor is None else tuple(tensor.shape))
    source = next(rank for rank, shape in enumerate(shapes) if shape is not None)
    moved: torch.Tensor = collectives.broadcast_object(world, tensor, source).to(world.device)
    return moved


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return the sum, mean, maximum or minimum over ranks."""
    return collectives.reduce(PartialState().world, tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad to the longest tensor of all ranks."""
    if getattr(tensor, "is_nested", False):
        warnings.warn(
            "Cannot pad nested tensors without more information. Leaving unprocessed.",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
        return tensor
    return collectives.pad_across_processes(PartialState().world, tensor, dim, pad_index, pad_first)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Repeat the last sample until the batch divides by the number of ranks."""
    missing = -batch_size % num_processes

    def pad(one: torch.Tensor) -> torch.Tensor:
        if missing == 0 or one.shape[dim] != batch_size:
            return one
        last = one.narrow(dim, batch_size - 1, 1)
        return torch.cat([one, *[last] * missing], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return the same slice of every tensor."""
    return nested.slice_tensors(data, tensor_slice)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate structures of one form; return a single one as it is."""
    if len(data) == 1:
        return data[0]
    return nested.concatenate(data, dim)


def convert_to_fp32(tensor: Any) -> Any:
    """Return half-precision tensors as float32."""
    return nested.to_float32(tensor)


class ConvertOutputsToFp32:
    """A forward whose outputs are float32; not picklable, because it refers to a live model."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> None:
        import pickle

        raise pickle.PicklingError(
            "Cannot pickle a prepared model with automatic mixed precision, please unwrap the model with "
            "`Accelerator.unwrap_model(model)` before pickling it."
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward whose outputs are float32."""
    converted = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converted(*args, **kwargs)

    forward.__wrapped__ = converted  # type: ignore[attr-defined]
    return forward


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to check that all ranks agree on its first argument."""

    @functools.wraps(function)
    def checked(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        state = PartialState()
        if state.distributed_type != DistributedType.NO:
            check_agreement(state.world, function.__name__, tensor)
        return function(tensor, *args, **kwargs)

    return checked
