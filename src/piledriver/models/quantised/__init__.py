"""Layers with weights of 8 or 4 bits, for inference: linear layers, experts of a mixture, the vocabulary's tables."""

from piledriver.models.quantised.experts import QuantisedExperts, StackedCodes, replace_experts
from piledriver.models.quantised.linear import DynamicQuantisedLinear, QuantisedLinear
from piledriver.models.quantised.replace import quantise_linears, replace_layer
from piledriver.models.quantised.vocabulary import (
    QuantisedEmbedding,
    check_vocabulary,
    quantise_embedding,
    quantise_head,
)

__all__ = [
    "DynamicQuantisedLinear",
    "QuantisedEmbedding",
    "QuantisedExperts",
    "QuantisedLinear",
    "StackedCodes",
    "check_vocabulary",
    "quantise_embedding",
    "quantise_head",
    "quantise_linears",
    "replace_experts",
    "replace_layer",
]
