"""The registry of kernels: operation and name to a class whose attributes say where it runs and what it can do.

`KERNELS["cross_entropy"]["triton"]` is a class. Built-in names stand in order of preference: `fastest_kernel` returns
the first that runs on a device. A kernel of another package (entry-point group `piledriver.<operation>_kernel`) never
runs by being installed; it is chosen by its name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Any, ClassVar

import torch

from piledriver.core.errors import UsageError
from piledriver.core.registry import Registry

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Triton comes with torch's GPU builds."""


class Kernel:
    """One implementation of an operation. Subclasses are registered; an instance is what a caller holds."""

    devices: ClassVar[frozenset[str] | None] = None
    """Device types that it runs on; None for all."""
    ops_to_save: ClassVar[tuple[str, ...]] = ()
    """Operators (`namespace::name`) whose outputs selective activation checkpointing keeps, being slow to recompute."""

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Return whether the kernel can be built and run on this device."""
        return cls.devices is None or device.type in cls.devices


class TritonKernel(Kernel):
    """A kernel written in Triton."""

    devices = frozenset({"cuda"})

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Return whether Triton is installed and the device is a GPU."""
        return HAS_TRITON and super().runs_on(device)


_BUILT_IN = {
    "attention": {
        "sdpa": "piledriver.kernels.attention.sdpa:SDPA",
        "varlen": "piledriver.kernels.attention.varlen:VarlenAttention",
        "flex": "piledriver.kernels.attention.flex:FlexAttention",
        "flash": "piledriver.kernels.attention.flash:FlashAttention",
        "reference": "piledriver.kernels.attention.reference:ReferenceAttention",
    },
    "cross_entropy": {
        "triton": "piledriver.kernels.cross_entropy.triton:TritonCrossEntropy",
        "compiled": "piledriver.kernels.cross_entropy.reference:CompiledCrossEntropy",
        "reference": "piledriver.kernels.cross_entropy.reference:ReferenceCrossEntropy",
    },
    "gated_mlp": {
        "triton": "piledriver.kernels.gated_mlp.triton:TritonGate",
        "reference": "piledriver.kernels.gated_mlp.reference:ReferenceGate",
    },
    "paged_attention": {
        "triton": "piledriver.kernels.paged_attention.triton:TritonPagedAttention",
        "native": "piledriver.kernels.paged_attention.native:NativePagedAttention",
        "cpu": "piledriver.kernels.paged_attention.cpu:CpuPagedAttention",
        "reference": "piledriver.kernels.paged_attention.reference:ReferencePagedAttention",
    },
    "sampling": {
        "triton": "piledriver.kernels.sampling.triton:TritonSampling",
        "reference": "piledriver.kernels.sampling.reference:ReferenceSampling",
    },
    "linear": {
        "triton": "piledriver.kernels.linear.triton:TritonLinear",
        "native": "piledriver.kernels.linear.native:NativeLinear",
        "onednn": "piledriver.kernels.linear.onednn:OneDnnLinear",
        "reference": "piledriver.kernels.linear.reference:ReferenceLinear",
    },
    "decode": {
        "triton": "piledriver.kernels.decode.triton:TritonDecode",
        "native": "piledriver.kernels.decode.native:NativeDecode",
        "cpu": "piledriver.kernels.decode.cpu:CpuDecode",
        "reference": "piledriver.kernels.decode.reference:ReferenceDecode",
    },
    "adamw": {
        "triton": "piledriver.kernels.adamw.triton:TritonAdamW",
        "reference": "piledriver.kernels.adamw.reference:ReferenceAdamW",
    },
    "column_loop": {
        "triton": "piledriver.kernels.column_loop.triton:TritonColumnLoop",
        "reference": "piledriver.kernels.column_loop.reference:ReferenceColumnLoop",
    },
    "fp8": {
        "triton": "piledriver.kernels.fp8.triton:TritonFp8",
        "reference": "piledriver.kernels.fp8.reference:ReferenceFp8",
    },
}

KERNELS: dict[str, Registry[type[Kernel]]] = {
    operation: Registry(f"{operation}_kernel", targets) for operation, targets in _BUILT_IN.items()
}


@functools.cache
def fastest_kernel(operation: str, device: torch.device) -> Any:
    """Return an instance of the first built-in kernel of an operation that runs on a device.

    >>> type(fastest_kernel("cross_entropy", torch.device("cpu"))).__name__
    'ReferenceCrossEntropy'
    """
    for name in _BUILT_IN[operation]:
        kernel = KERNELS[operation][name]
        if kernel.runs_on(device):
            return kernel()
    raise UsageError(f"no {operation} kernel runs on {device}", fix=f"use one of {', '.join(_BUILT_IN[operation])}")


def ops_to_save() -> frozenset[str]:
    """Return the operators of all registered kernels whose outputs selective activation checkpointing keeps."""
    found: set[str] = set()
    for kernels in KERNELS.values():
        for name in kernels:
            # A kernel of another package that cannot be imported cannot run either.
            with contextlib.suppress(ImportError, AttributeError):
                found.update(kernels[name].ops_to_save)
    return frozenset(found)
