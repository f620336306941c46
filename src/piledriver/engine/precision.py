"""Mixed precision: fp32 master weights with 16-bit activations; the `*-pure` modes also keep bf16 weights.

Our own models take a compute dtype where the embedding enters the residual stream: each layer casts its weight on the
way, which the compiler fuses. Other models compute under autocast, their outputs in fp32. In `apply.py` this step comes
after tensor parallelism (which may replace weights) and before anything that wraps a block's forward.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from piledriver.engine.errors import PrecisionError
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import Mesh
from piledriver.runtime.collectives.nested import to_float32

_COMPUTE_DTYPES = {
    "bf16": torch.bfloat16,
    "bf16-pure": torch.bfloat16,
    "fp8": torch.bfloat16,
    "fp8-rowwise": torch.bfloat16,
    "fp8-pure": torch.bfloat16,
    "fp16": torch.float16,
}


def compute_dtype(layout: Layout) -> torch.dtype | None:
    """Return the dtype of activations between matrix products; None for fp32.

    >>> compute_dtype(Layout(precision="bf16")), compute_dtype(Layout())
    (torch.bfloat16, None)
    """
    return _COMPUTE_DTYPES.get(layout.precision)


def check_device(layout: Layout, device: torch.device) -> None:
    """Reject a mixed precision that a device cannot compute in, before anything is prepared."""
    if layout.reducer != "ddp":
        return
    if layout.precision == "fp16" and device.type not in ("cuda", "xpu", "mps", "xla"):
        raise PrecisionError(
            f"fp16 mixed precision requires a GPU (not {device.type!r})", fix="use bf16, which CPUs can compute in"
        )
    if layout.precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise PrecisionError("bf16 mixed precision requires a newer GPU than this one", fix="use fp16")


def autocast(layout: Layout, device_type: str, options: Mapping[str, Any] | None = None) -> AbstractContextManager[Any]:
    """Return a context that computes in the layout's precision; `options` are further arguments of `torch.autocast`."""
    dtype = compute_dtype(layout)
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype, **(options or {}))


def apply_precision(model: nn.Module, mesh: Mesh, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Make a model compute in the layout's precision, in place. fp8 layers follow in `fp8/`; the rest is bf16."""
    dtype = compute_dtype(mesh.layout)
    if dtype is None:
        return model
    if mesh.layout.has_bf16_weights:
        make_pure(model)
    ours = own_transformers(model)
    if options is None or options.get("enabled", True):
        for module in ours:
            module.compute_dtype = dtype
    if not any(module is model for module in ours):
        context = functools.partial(autocast, mesh.layout, mesh.device_type, options)
        model.forward = AutocastForward(model.forward, context)
    return model


def restore_forward(model: nn.Module) -> None:
    """Undo `apply_precision`: the model computes in the precision of its weights again."""
    if isinstance(forward := model.__dict__.get("forward"), AutocastForward):
        del model.__dict__["forward"]
        if forward.forward != model.forward:
            model.forward = forward.forward
    for module in own_transformers(model):
        module.compute_dtype = None


def make_pure(model: nn.Module) -> None:
    """Cast parameters to bf16, keeping the objects; buffers (rotary tables, running statistics) keep their dtype.

    So do parameters that a module names in `fp32_parameters` (the router's correction bias, which bf16 would round
    away), and those that `transformers` keeps in fp32 under any dtype.
    """
    kept = {id(parameter) for parameter in fp32_parameters(model)}
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in kept:
            parameter.data = parameter.data.to(torch.bfloat16)


def fp32_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that stay in fp32 where the weights are bf16."""
    found = []
    for module in model.modules():
        names = set(getattr(module, "fp32_parameters", ()))
        patterns = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
        found += [parameter for name, parameter in module.named_parameters(recurse=False) if name in names]
        found += [
            parameter
            for name, parameter in (module.named_parameters() if patterns else ())
            if any(pattern in name.split(".") for pattern in patterns)
        ]
    return found


def own_transformers(model: nn.Module) -> list[Any]:
    """Return our own models among the modules of a model, without importing them for loops that use none."""
    known: Any = sys.modules.get("piledriver.models.transformer")
    return [] if known is None else [module for module in model.modules() if isinstance(module, known.Transformer)]


class AutocastForward:
    """A forward under autocast, with outputs in fp32 so that losses computed outside are exact."""

    def __init__(self, forward: Callable[..., Any], context: Callable[[], AbstractContextManager[Any]]) -> None:
        # Libraries inspect the signature of a model's forward.
        functools.update_wrapper(self, forward)
        self.forward, self.context = forward, context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.context():
            output = self.forward(*args, **kwargs)
        return to_float32(output)
