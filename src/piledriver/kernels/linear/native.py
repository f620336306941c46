"""Linear layers of a few fp32 rows on a CPU by a C kernel, which reads the weight once and as it lies.

BLAS repacks the weight in every product of a few rows, and a packed copy takes as much memory again. Norm, bias, gate
and residual are part of the one call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.linear.onednn import OneDnnLinear
from piledriver.kernels.linear.weights import QuantisedWeight
from piledriver.kernels.native.library import native_library
from piledriver.kernels.native.steps import MOST_ROWS, WIDEST, LinearStep
from piledriver.kernels.native.tensors import is_plain


class NativeLinear(OneDnnLinear):
    """A few rows by the C kernel, others by oneDNN."""

    def __init__(self) -> None:
        library = native_library()
        assert library is not None, "ask `runs_on` first"
        self._function, self._gate = library.piledriver_linear, library.piledriver_gate

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Return whether the device is a CPU, and C kernels can be compiled."""
        return super().runs_on(device) and native_library() is not None

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | QuantisedWeight,
        fused: Fused = PRODUCT_ONLY,
        *,
        invariant: bool = False,
    ) -> Tensor:
        rows, columns = x.shape
        if invariant or not 0 < rows <= MOST_ROWS or not isinstance(weight, Tensor) or not _fits(x, weight, fused):
            return super().__call__(x, weight, fused, invariant=invariant)
        norm, eps, bias, gate_block, residual = fused
        outputs = weight.shape[0]
        out = x.new_empty(rows, outputs // 2 if gate_block else outputs)
        arranged = x.new_empty(rows * (columns + WIDEST))
        step = LinearStep(
            x.data_ptr(),
            weight.data_ptr(),
            None if norm is None else norm.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            arranged.data_ptr(),
            out.data_ptr(),
            *(rows, columns, outputs, gate_block, eps, torch.get_num_threads()),
        )
        self._function(step)
        return out

    def gate(self, x: Tensor, block: int) -> Tensor:
        if x.shape[1] % (2 * block):
            return super().gate(x, block)
        rows, units = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, units)
        self._gate(x.data_ptr(), out.data_ptr(), rows, units, block, torch.get_num_threads())
        return out


def _fits(x: Tensor, weight: Tensor, fused: Fused) -> bool:
    """Return whether the C kernel covers these tensors; for wrong shapes the others raise torch's errors."""
    norm, _, bias, gate_block, residual = fused
    (rows, columns), outputs = x.shape, weight.shape[0]
    if torch.is_grad_enabled() or not is_plain(x, weight, norm, bias, residual) or weight.shape[1] != columns:
        return False
    if gate_block and outputs % (2 * gate_block):
        return False
    result = rows, outputs // 2 if gate_block else outputs
    wanted = ((norm, (columns,)), (bias, (outputs,)), (residual, result))
    return all(tensor is None or tensor.shape == shape for tensor, shape in wanted)
