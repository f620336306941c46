"""What a model computes in. Weights stay fp32 (masters) but in the pure ones; what flows through the blocks is smaller.

Our own models take a compute dtype where the embedding enters the residual stream: each layer casts its weight on the
way, which the compiler fuses. Other models compute under autocast, their outputs in fp32. Step of `apply.py`: after
tensor parallel (which may have replaced weights), before anything that wraps a block's forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from piledriver.engine.layout import Layout
from piledriver.engine.mesh import Mesh
from piledriver.models import Transformer
from piledriver.runtime.collectives.nested import to_float32

_COMPUTED_IN = {
    "bf16": torch.bfloat16,
    "bf16-pure": torch.bfloat16,
    "fp8": torch.bfloat16,
    "fp8-rowwise": torch.bfloat16,
    "fp8-pure": torch.bfloat16,
    "fp16": torch.float16,
}


def compute_dtype(layout: Layout) -> torch.dtype | None:
    """The dtype between the matrix products; None where it is that of the weights (fp32).

    >>> compute_dtype(Layout(precision="bf16")), compute_dtype(Layout())
    (torch.bfloat16, None)
    """
    return _COMPUTED_IN.get(layout.precision)


def mixed_precision_policy(layout: Layout) -> MixedPrecisionPolicy:
    """For `fully_shard`: parameters are gathered in what is computed in, gradients are summed in fp32.

    Inputs are not cast: what a block is given has its dtype from the block before.
    """
    dtype = compute_dtype(layout)
    if dtype is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    gathered = None if layout.has_bf16_weights else dtype
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)


def apply_precision(model: nn.Module, mesh: Mesh | None, layout: Layout) -> nn.Module:
    """Make a model compute in the layout's precision; in place. fp8 layers are `fp8.py`'s, the rest of them is bf16."""
    dtype = compute_dtype(layout)
    if dtype is None:
        return model
    if layout.has_bf16_weights:
        make_pure(model)
    for module in model.modules():
        if isinstance(module, Transformer):
            module.compute_dtype = dtype
    if not isinstance(model, Transformer):
        device = "cpu" if mesh is None else mesh.device_type
        model.forward = AutocastForward(model.forward, functools.partial(torch.autocast, device, dtype))
    return model


def make_pure(model: nn.Module) -> None:
    """Parameters in bf16, the same objects; buffers (rotary tables, running statistics) keep their precision."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


class AutocastForward:
    """A forward under autocast, its outputs in fp32 so that losses outside are exact."""

    def __init__(self, forward: Callable[..., Any], context: Callable[[], Any]) -> None:
        self.forward, self.context = forward, context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.context():
            out = self.forward(*args, **kwargs)
        return to_float32(out)
