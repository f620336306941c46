"""Layers with weights of 8 or 4 bits, for inference: linear layers, and the experts of a mixture."""

from piledriver.models.quantised.experts import QuantisedExperts, StackedCodes, replace_experts
from piledriver.models.quantised.linear import (
    DynamicQuantisedLinear,
    QuantisedLinear,
    QuantisedProjection,
    quantise_linears,
    replace_linear,
)

__all__ = [
    "DynamicQuantisedLinear",
    "QuantisedExperts",
    "QuantisedLinear",
    "QuantisedProjection",
    "StackedCodes",
    "quantise_linears",
    "replace_experts",
    "replace_linear",
]
