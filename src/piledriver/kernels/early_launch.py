# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Programmatic dependent launch: a kernel starts while its predecessor ends, and waits before it reads its results.

A chain of small kernels hides launches and first loads of weights this way. Every kernel of a chain signals its
dependents (`gdc_launch_dependents`), most when they start, and waits (`gdc_wait`) before it reads what another kernel
of the chain wrote and before it writes anything. A kernel that has waited may rely on all kernels before it.
"""

from __future__ import annotations

import functools

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_SUPPORTED = False
if triton is not None:
    try:
        from triton.language.extra.cuda import gdc_launch_dependents as gdc_launch_dependents
        from triton.language.extra.cuda import gdc_wait as gdc_wait

        _SUPPORTED = True
    except ImportError:

        @triton.jit
        def gdc_launch_dependents():
            """Do nothing: this Triton has no early launches."""

        @triton.jit
        def gdc_wait():
            """Do nothing: this Triton has no early launches."""

    @triton.jit
    def prefetch(rows, ELEMENTS: tl.constexpr, LINE: tl.constexpr):
        """Start loading the first elements of each row, `LINE` to 128 bytes, into the second-level cache."""
        places = (rows + tl.arange(0, ELEMENTS // LINE)[None, :] * LINE).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
        )


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Return whether kernels on a device can be launched this way: NVIDIA GPUs from Hopper on."""
    if not _SUPPORTED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def processor_count(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a GPU."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def launch_options(early: bool) -> dict[str, bool]:
    """Return the options of a kernel call."""
    return {"launch_pdl": True} if early else {}


def prefetched(wanted: int, shortest: int, line: int) -> int:
    """Return how many elements of a row `prefetch` takes: a power of two within `shortest`, at least a line, or 0."""
    most = 1 << (max(min(wanted, shortest), 1).bit_length() - 1)
    return most if most >= line else 0
