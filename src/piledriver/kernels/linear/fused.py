"""What linear kernels compute beside their product, in the same launch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from piledriver.kernels.decode import rms_norm


class Fused(NamedTuple):
    """An RMS norm of the input; a bias, silu(gate) * up and a residual of the output, in this order."""

    norm: Tensor | None = None
    """Weight of the RMS norm; None for none."""
    eps: float = 0.0
    """Added to the mean square of the norm."""
    bias: Tensor | None = None
    gate_block: int = 0
    """Rows of the weight alternate in blocks of this size: gate, up, gate, up; 0 for no gate."""
    residual: Tensor | None = None

    def normalised(self, x: Tensor) -> Tensor:
        """Return x after the norm."""
        return x if self.norm is None else rms_norm(x, self.norm, self.eps)

    def widened(self) -> Fused:
        """Return the same in fp32."""
        norm, bias, residual = (None if x is None else x.float() for x in (self.norm, self.bias, self.residual))
        return self._replace(norm=norm, bias=bias, residual=residual)


PRODUCT_ONLY = Fused()
