"""A stage of our own model: some of embedding, blocks, norm and output, with the loss inside the last one.

The loss is computed inside `forward`, where parameters that zero 3 shares out are gathered. The load balance of the
experts travels from stage to stage as a running sum beside the hidden states, so that its gradient finds every block.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from piledriver.models import Transformer
from piledriver.models.attention.masks import make_masks
from piledriver.models.loss import LossSums


class TransformerStage(Transformer):
    """A `Transformer` that holds some of its parts and runs them on what the stage before made."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        balance: Tensor | None = None,
        *,
        time: int,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        reduction: Literal["sum", "none"] = "sum",
    ) -> Any:
        """Tokens or hidden states in; hidden states, logits, or the five sums of `LossSums` as one fp64 vector out.

        With `reduction="none"` the last stage gives the loss of every target instead of sums.
        """
        masks = None
        if document_ids is not None:
            kernel = self.attention_kernel
            masks = make_masks(self.config, time, document_ids.device, document_ids, kernel=kernel)
        x, balances = self.run(x, time=time, masks=masks)
        if self.config.moe is not None:
            here = torch.stack(balances).sum(0, keepdim=True) if balances else x.new_zeros(1, dtype=torch.float32)
            balance = here if balance is None else balance + here
        if self.norm is None:
            x = own_memory(x)
            return x if balance is None else (x, balance)
        if targets is None:
            return self.logits(x)
        if reduction == "none":
            return self.token_losses(x, self.output_weight(), targets, softcap=self.config.logit_softcap)
        mean = None if balance is None else balance.sum() / self.config.layers
        return pack(self.loss(x, targets, mean))


def own_memory(x: Tensor) -> Tensor:
    """A copy of a view: torch detaches what stages give in place, which views do not allow."""
    return x.clone() if x._is_view() else x


def pack(sums: LossSums) -> Tensor:
    """One vector, which can travel and be added up. fp64 counts tokens exactly."""
    return torch.stack([value.double() for value in sums])


def unpack(vector: Tensor) -> LossSums:
    """The sums of a vector."""
    return LossSums(*vector.unbind())


def make_transformer_stage(shell: nn.Module) -> nn.Module:
    """Give a shallow copy of a `Transformer` the forward of a stage."""
    shell.__class__ = TransformerStage
    return shell
