"""Embeddings: rows by number, and the same table as an output layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.functional.errors import InputShapeError
from piledriver.functional.frame import Axes, Initialiser
from piledriver.functional.initialisers import variance_scaling
from piledriver.functional.layers.linear import promoted
from piledriver.functional.module import Module


class Embed(Module):
    """A table of `count` rows of `features` numbers."""

    count: int
    features: int
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    embedding_init: Initialiser = variance_scaling(1.0, "fan_in", "normal", out_dims=0)
    embedding_axes: Axes | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise InputShapeError(self.path, f"got {tokens.dtype} where row numbers belong", "pass integers")
        if tokens.dtype not in (torch.int32, torch.int64):
            tokens = tokens.long()
        table = self._table()
        # Gathering first and casting the rows afterwards reads the table once, in the rows that are used.
        try:
            if hasattr(table, "placements"):
                from piledriver.functional.partitioning import embed_locally

                rows = embed_locally(tokens, table)
            else:
                rows = F.embedding(tokens, table)
        except IndexError as error:
            raise InputShapeError(
                self.path,
                f"row numbers from {int(tokens.min())} to {int(tokens.max())} for a table of {self.count} rows",
                "make the table larger, or use the tokenizer that the model was made for",
            ) from error
        return rows if self.dtype is None else rows.to(self.dtype)

    def attend(self, query: Tensor) -> Tensor:
        """Return the product of the query with every row: logits from tied weights."""
        if query.shape[-1:] != (self.features,):
            raise InputShapeError(
                self.path, f"attend of {tuple(query.shape)} to rows of {self.features}", "pass (..., features)"
            )
        query, table = promoted(self.dtype, query, self._table())
        return F.linear(query, table)

    def _table(self) -> Tensor:
        return self.param(
            "embedding", self.embedding_init, (self.count, self.features), self.param_dtype, self.embedding_axes
        )
