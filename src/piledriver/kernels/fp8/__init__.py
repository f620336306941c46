"""Linear layers and gated MLPs in fp8, with their gradients.

Casts and products have two kernels: `triton` on GPUs with fp8 matrix units (Hopper and later), and `reference`, which
computes the same numbers on any device (slowly: for tests).
"""

from piledriver.kernels.fp8.gated_mlp import fp8_gated_mlp
from piledriver.kernels.fp8.linear import fp8_linear
from piledriver.kernels.fp8.reference import BACKWARD, FORWARD, MULTIPLE

__all__ = ["BACKWARD", "FORWARD", "MULTIPLE", "fp8_gated_mlp", "fp8_linear"]
