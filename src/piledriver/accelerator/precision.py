"""In which precision does a model compute: autocast around its forward, and a scaler for fp16 gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from piledriver.accelerator.errors import PrecisionError
from piledriver.accelerator.options import AutocastKwargs, GradScalerKwargs, PrecisionType
from piledriver.engine.layout import Layout
from piledriver.runtime import environment
from piledriver.runtime.collectives.nested import to_float32

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def resolve_precision(wanted: str | PrecisionType | None) -> str:
    """The argument, else the environment's, else none.

    >>> resolve_precision("BF16")
    'bf16'
    """
    if wanted is None:
        found = environment.read(environment.MIXED_PRECISION)
        wanted = found[0] if found is not None else "no"
    name = str(getattr(wanted, "value", wanted)).lower()
    if name not in PrecisionType:
        raise PrecisionError(
            f"unknown mixed_precision mode: {name!r}", fix=f"choose from {', '.join(PrecisionType.list())}"
        )
    return name


def check_precision(name: str, device: torch.device, *, engine: bool = False) -> None:
    """Refuse what this device cannot do, before anything is prepared. The engine checks its own."""
    if engine:
        return
    if name == "fp16" and device.type not in ("cuda", "xpu", "mps", "xla"):
        raise PrecisionError(
            f"fp16 mixed precision requires a GPU (not {device.type!r})", fix="use bf16, which CPUs can compute in"
        )
    if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise PrecisionError("bf16 mixed precision requires a newer GPU than this one", fix="use fp16")


def autocast_context(
    name: str, device: torch.device, options: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """A context that computes in the given precision."""
    if name not in _DTYPES:
        return nullcontext()
    options = options or AutocastKwargs()
    return torch.autocast(
        device.type, dtype=_DTYPES[name], enabled=options.enabled, cache_enabled=options.cache_enabled
    )


def grad_scaler(name: str, device: torch.device, options: GradScalerKwargs | None, layout: Layout | None = None) -> Any:
    """The scaler that fp16 gradients need; None for other precisions. With a layout all processes skip together."""
    if layout is not None and layout.precision == "fp16":
        from piledriver.engine.optimizer.loss_scale import LossScaler, torch_like

        told = options.to_kwargs() if options is not None else {}
        enabled = bool(told.pop("enabled", True))
        return LossScaler(torch_like(**told), device=device, enabled=enabled)
    if layout is not None or name != "fp16":
        return None
    return torch.amp.GradScaler(device.type, **(options.to_kwargs() if options is not None else {}))


def is_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Whether an optimizer's gradients were unscaled since the last step."""
    if hasattr(scaler, "is_unscaled"):
        return bool(scaler.is_unscaled(optimizer))
    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"].value != 0)


def forget_unscaled(scaler: Any, optimizer: Any) -> None:
    """An optimizer's gradients are gone, so it does not matter any more whether they were unscaled.

    Where a step failed between unscaling and its end, the gradients of the next one would pass for unscaled.
    """
    if hasattr(scaler, "forget"):
        scaler.forget(optimizer)
    else:
        scaler._per_optimizer_states.pop(id(optimizer), None)


class ComputeIn:
    """A model's forward under autocast, its outputs in float32 so that losses outside are exact."""

    def __init__(self, forward: Callable[..., Any], context: Callable[[], AbstractContextManager[Any]]) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.context():
            output = self.forward(*args, **kwargs)
        return to_float32(output)


def compute_in(model: nn.Module, name: str, device: torch.device, options: AutocastKwargs | None) -> None:
    """Make a model compute in a precision; `restore_forward` undoes it."""
    if name not in _DTYPES or hasattr(model, "_original_forward"):
        return
    model._original_forward = model.forward  # type: ignore[assignment]
    context = functools.partial(autocast_context, name, device, options)
    model.forward = ComputeIn(model.forward, context)
    for module in _our_models(model) if options is None or options.enabled else ():
        # Their loss takes products into memory of its own, which autocast does not know of.
        module.compute_dtype = _DTYPES[name]


def _our_models(model: nn.Module) -> list[Any]:
    """Our own models among the parts of a model; they are not imported for those who have none."""
    known: Any = sys.modules.get("piledriver.models.transformer")
    return [] if known is None else [module for module in model.modules() if isinstance(module, known.Transformer)]


def restore_forward(model: nn.Module) -> None:
    """The model's own forward again."""
    if "_original_forward" not in model.__dict__:
        return
    model.__dict__.pop("_original_forward")
    model.__dict__.pop("forward", None)
    for module in _our_models(model):
        module.compute_dtype = None
