"""Embedding and output projection with 8-bit weights: codes at rest, a scale for each token of the vocabulary."""

from __future__ import annotations

from typing import ClassVar, cast

from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.kernels.linear import QuantisedWeight, WeightKind, quantise_weight
from piledriver.kernels.linear.embedding_rows import embedding_rows
from piledriver.models.codes import QuantisedCodes
from piledriver.models.config import ModelConfig
from piledriver.models.layers import Embedding
from piledriver.models.quantised.linear import QuantisedLinear
from piledriver.models.transformer import Transformer


class QuantisedEmbedding(QuantisedCodes):
    """An `Embedding` whose table is stored in 8 bits; inference only. A tied output projection reads the same codes.

    >>> import torch
    >>> table = QuantisedEmbedding(quantise_weight(torch.randn(10, 4), "int8"))
    >>> torch.equal(table(torch.tensor([[3, 7]]))[0], table.dense()[[3, 7]])
    True
    """

    casts_scales: ClassVar[bool] = True  # its output is in their dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens in the dtype of the scales."""
        return embedding_rows(self.quantised, tokens)


def check_vocabulary(
    config: ModelConfig, *, head: WeightKind | None = None, embedding: WeightKind | None = None
) -> None:
    """Raise `UsageError` if the output projection or the embedding of a model cannot be stored so."""
    if "int4" in (head, embedding):
        raise UsageError("a head or an embedding cannot be int4", fix="use int8 or fp8")
    if head is not None and config.head_bias:
        raise UsageError("an output projection with a bias cannot be quantised", fix="leave out head")
    if config.tied and head is not None and embedding not in (None, head):
        raise UsageError(f"head {head} and embedding {embedding} are one tied weight", fix="leave out embedding")


def quantise_embedding(model: Transformer, kind: WeightKind) -> QuantisedWeight:
    """Round the embedding, and with it a tied output projection, in place; return the rounded table."""
    table = cast(Embedding, model.embedding)
    model.embedding = QuantisedEmbedding(quantise_weight(table.weight, kind))
    return model.embedding.quantised


def quantise_head(model: Transformer, kind: WeightKind) -> QuantisedWeight:
    """Round the output projection, and with it a tied embedding, in place; return the rounded weight."""
    if model.head is None:
        return quantise_embedding(model, kind)
    model.head = QuantisedLinear(quantise_weight(model.output_weight(), kind))
    return model.head.quantised
