"""Linear layers of a few fp32 rows on a CPU by a C kernel, which reads the weight once and as it lies.

BLAS repacks the weight in every product of a few rows, and a packed copy takes as much memory again. Norm, bias, gate
and residual are part of the one call. Codes of quantised weights become fp32 in registers, so that a product reads a
fourth or an eighth of the bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.linear.onednn import OneDnnLinear
from piledriver.kernels.native.library import native_library
from piledriver.kernels.native.steps import CHUNK, LEAST_PART, MOST_ROWS, WIDEST, LinearStep
from piledriver.kernels.native.tensors import fits_native_weight, is_plain, weight_address
from piledriver.kernels.quantised_weight import QuantisedWeight

_MOST_QUANTISED_ROWS = 48
"""Rows up to which the C kernel takes codes; beyond, oneDNN's tiles are faster, over codes that are made dense."""
_DENSE_ROWS = 1024
"""Rows of a quantised weight that are made dense at a time: they stay in the cache until they are multiplied."""


class NativeLinear(OneDnnLinear):
    """A few rows by the C kernel, others by oneDNN."""

    def __init__(self) -> None:
        library = native_library()
        assert library is not None, "ask `runs_on` first"
        self._function, self._gate = library.piledriver_linear, library.piledriver_gate
        self._dequantise = library.piledriver_dequantise

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
        if isinstance(weight, QuantisedWeight) and _is_short(x) and not invariant:
            return self(x.float(), weight, fused.widened()).to(x.dtype)
        covered = not invariant and len(x) > 0 and _fits(x, weight, fused)
        if isinstance(weight, Tensor):
            if covered and len(x) <= MOST_ROWS:
                return self._few_rows(x, weight, fused)
        elif fits_native_weight(weight):
            weight = weight._replace(scales=weight.scales.float())
            if covered:
                product = self._few_rows if len(x) <= _MOST_QUANTISED_ROWS else self._many_rows
                return product(x, weight, fused)
            weight = self._dense(weight, torch.empty(weight.shape))
        return super().__call__(x, weight, fused, invariant=invariant)

    def _few_rows(self, x: Tensor, weight: Tensor | QuantisedWeight, fused: Fused) -> Tensor:
        rows, columns = x.shape
        norm, eps, bias, gate_block, residual = fused
        outputs, threads = weight.shape[0], torch.get_num_threads()
        out = x.new_empty(rows, outputs // 2 if gate_block else outputs)
        arranged = x.new_empty(rows * (columns + WIDEST))
        several = isinstance(weight, QuantisedWeight) and rows > LEAST_PART
        decoded = x.new_empty(threads * CHUNK * columns) if several else None
        step = LinearStep(
            x.data_ptr(),
            weight_address(weight),
            *(None if one is None else one.data_ptr() for one in (norm, bias, residual, arranged, decoded, out)),
            *(rows, columns, outputs, gate_block, eps, threads),
        )
        self._function(step)
        return out

    def _many_rows(self, x: Tensor, weight: QuantisedWeight, fused: Fused) -> Tensor:
        x = fused.normalised(x)
        outputs, columns = weight.shape
        out, dense = x.new_empty(len(x), outputs), x.new_empty(min(outputs, _DENSE_ROWS), columns)
        for first in range(0, outputs, _DENSE_ROWS):
            rows = slice(first, first + _DENSE_ROWS)
            zeros = None if weight.zeros is None else weight.zeros[rows]
            part = QuantisedWeight(weight.kind, weight.data[rows], weight.scales[rows], zeros)
            found = self._dense(part, dense[: part.shape[0]])
            out[:, rows] = torch.ops.mkldnn._linear_pointwise(x, found, None, "none", [], "")
        out = out if fused.bias is None else out.add_(fused.bias)
        out = self.gate(out, fused.gate_block) if fused.gate_block else out
        return out if fused.residual is None else out.add_(fused.residual)

    def _dense(self, weight: QuantisedWeight, out: Tensor) -> Tensor:
        """Write what codes stand for to `out`, and return it."""
        self._dequantise(weight_address(weight), *weight.shape, out.data_ptr(), torch.get_num_threads())
        return out

    def gate(self, x: Tensor, block: int) -> Tensor:
        if x.shape[1] % (2 * block):
            return super().gate(x, block)
        rows, units = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, units)
        self._gate(x.data_ptr(), out.data_ptr(), rows, units, block, torch.get_num_threads())
        return out


def _is_short(x: Tensor) -> bool:
    """Return whether inputs have 16 bits, outside autograd: codes become fp32 anyway, and CPUs are slow in 16 bits."""
    return x.dtype in (torch.bfloat16, torch.float16) and not torch.is_grad_enabled()


def _fits(x: Tensor, weight: Tensor | QuantisedWeight, fused: Fused) -> bool:
    """Return whether the C kernel covers these tensors; for wrong shapes the others raise torch's errors."""
    norm, _, bias, gate_block, residual = fused
    (rows, columns), outputs = x.shape, weight.shape[0]
    if torch.is_grad_enabled() or not is_plain(x, norm, bias, residual) or weight.shape[1] != columns:
        return False
    if not fits_native_weight(weight) or (gate_block and outputs % (2 * gate_block)):
        return False
    result = rows, outputs // 2 if gate_block else outputs
    wanted = ((norm, (columns,)), (bias, (outputs,)), (residual, result))
    return all(tensor is None or tensor.shape == shape for tensor, shape in wanted)
