"""The second half of a gated MLP, (activation(gate) * up) @ weight.T, keeping only its inputs for the backward pass.

`can_fuse` says whether it pays: on a GPU with Triton, for silu and gelu. The activation then has the kernel `triton`;
elsewhere the operators run `reference`.
"""

from piledriver.kernels.gated_mlp.linear import can_fuse, gated_linear
from piledriver.kernels.gated_mlp.reference import ACTIVATIONS

__all__ = ["ACTIVATIONS", "can_fuse", "gated_linear"]
