"""The second half of a gated MLP, (silu(gate) * up) @ weight.T, keeping only its inputs for the backward pass.

`can_fuse` says whether it pays: on a GPU with Triton, for silu. The activation then has the kernel `triton`; elsewhere
the operators run `reference`.
"""

from piledriver.kernels.gated_mlp.linear import can_fuse, gated_linear

__all__ = ["can_fuse", "gated_linear"]
