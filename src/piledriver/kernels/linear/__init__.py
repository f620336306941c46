"""Linear layers of inference: plain or quantised weights, batch-invariant products, fused epilogues.

`linear` computes x @ weight.T and, in the same kernel, a bias, silu(gate) * up, or the sum with a residual. Weights are
16-bit, int8 or fp8 with a scale for each row, or int4 with a scale for each group of a row (`QuantisedWeight`). With
`invariant`, each row of the result is computed in one order whatever the number of rows. `triton` runs on a GPU,
`native` (in C) and `onednn` on a CPU, `reference` everywhere.
"""

from piledriver.kernels.linear.dispatch import linear
from piledriver.kernels.quantised_weight import (
    GROUP,
    GROUPS,
    QuantisedWeight,
    WeightGrid,
    WeightKind,
    dequantise_weight,
    quantise_weight,
    weight_codes,
    weight_grid,
)

__all__ = [
    "GROUP",
    "GROUPS",
    "QuantisedWeight",
    "WeightGrid",
    "WeightKind",
    "dequantise_weight",
    "linear",
    "quantise_weight",
    "weight_codes",
    "weight_grid",
]
