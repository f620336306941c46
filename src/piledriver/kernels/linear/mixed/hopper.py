# mypy: disable-error-code="import-not-found,import-untyped"
"""What the Gluon kernels for Hopper share: whether they can run, blocks that tensor copies load, names of Triton's."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from piledriver.kernels.early_launch import processor_count, starts_early

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:
    gl = None

if gl is not None:
    # Named otherwise before Triton 3.8 and 3.9.
    async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    _Memory = gl.shared_memory_descriptor
    reinterpret = _Memory.reinterpret if hasattr(_Memory, "reinterpret") else _Memory._reinterpret


@functools.cache
def hopper_processors(device: torch.device) -> int:
    """Return the number of processors of a Hopper GPU, 0 for other devices."""
    if not starts_early(device) or torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    return processor_count(device)


def is_aligned(x: Tensor) -> bool:
    """Return whether tensor descriptors take a matrix: rows without gaps that begin at multiples of 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def described_blocks(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """Return a descriptor of [columns / 64, rows, 64], of which a load takes `box`: several blocks of 64 columns."""
    blocks = tensor.view(len(tensor), -1, 64).permute(1, 0, 2)
    return TensorDescriptor.from_tensor(blocks, [*box, 64], layout_of_blocks(tensor, 3))


def layout_of_blocks(tensor: Tensor, rank: int) -> gl.NVMMASharedLayout:
    """Return the layout of rows of 64 elements in shared memory, of which each is a line of the swizzle."""
    return gl.NVMMASharedLayout(64 * tensor.element_size(), 8 * tensor.element_size(), rank)
