# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
"""activation(gate) * up and its gradient as GPU kernels that read each element once.

The backward also returns the activation, computed from what it reads: nothing has to keep it for the gradient of the
next weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.registry import TritonKernel

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK = 1024
_CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2}

if triton is not None:

    @triton.jit
    def _value_and_slope(x, activation: tl.constexpr):
        """Return an activation and its derivative."""
        if activation == 0:
            sigmoid = tl.sigmoid(x)
            value = x * sigmoid
            slope = sigmoid + value * (1.0 - sigmoid)
        elif activation == 1:
            inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
            tanh = 2.0 * tl.sigmoid(2.0 * inner) - 1.0
            value = 0.5 * x * (1.0 + tanh)
            slope = 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        else:
            normal = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
            value = x * normal
            slope = normal + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
        return value, slope

    @triton.jit
    def _forward(gate_up, out, width, group: tl.constexpr, activation: tl.constexpr, block: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        inside = column < width
        place = gate_up + row * 2 * width + (column // group) * 2 * group + column % group
        gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(place + group, mask=inside, other=0.0).to(tl.float32)
        value, _ = _value_and_slope(gate, activation)
        tl.store(out + row * width + column, (value * up).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _backward(
        gate_up,
        gradient,
        by_gate_up,
        out,
        width,
        group: tl.constexpr,
        activation: tl.constexpr,
        block: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        inside = column < width
        place = row * 2 * width + (column // group) * 2 * group + column % group
        gate = tl.load(gate_up + place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + place + group, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(gradient + row * width + column, mask=inside, other=0.0).to(tl.float32)
        value, slope = _value_and_slope(gate, activation)
        small: tl.constexpr = out.dtype.element_ty
        tl.store(by_gate_up + place, (above * up * slope).to(small), mask=inside)
        tl.store(by_gate_up + place + group, (above * value).to(small), mask=inside)
        tl.store(out + row * width + column, (value * up).to(small), mask=inside)


class TritonGate(TritonKernel):
    """One program per row and block of columns."""

    def forward(self, gate_up: Tensor, group: int, activation: str = "silu") -> Tensor:
        """Return activation(gate) * up: [rows, 2 * width] to [rows, width]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        _forward[(rows, triton.cdiv(width, _BLOCK))](
            gate_up, out, width, group=group, activation=_CODES[activation], block=_BLOCK, num_warps=4
        )
        return out

    def backward(
        self, gate_up: Tensor, gradient: Tensor, group: int, activation: str = "silu"
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient with respect to `gate_up`, and what `forward` returned."""
        rows, width = gradient.shape
        by_gate_up, out = torch.empty_like(gate_up), torch.empty_like(gradient)
        _backward[(rows, triton.cdiv(width, _BLOCK))](
            gate_up,
            gradient,
            by_gate_up,
            out,
            width,
            group=group,
            activation=_CODES[activation],
            block=_BLOCK,
            num_warps=4,
        )
        return by_gate_up, out
