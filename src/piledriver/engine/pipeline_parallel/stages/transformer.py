"""A stage of our own `Transformer`; the last one computes the loss.

The loss is computed inside `forward`, where zero 3 has gathered the parameters. The experts' balance loss is passed
from stage to stage as a running sum, so that its gradient reaches every block.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from piledriver.models import Transformer
from piledriver.models.attention.masks import make_masks
from piledriver.models.loss import LossSums


class TransformerStage(Transformer):
    """A `Transformer` with some of its modules, which runs on the outputs of the previous stage."""

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
        """Return hidden states, logits, or the five sums of `LossSums` as one fp64 vector.

        With `reduction="none"` the last stage returns the loss of every target instead.
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
            return self.losses_by_token(x, targets)
        mean = None if balance is None else balance.sum() / self.config.expert_layers
        return pack(self.loss(x, targets, mean))


def own_memory(x: Tensor) -> Tensor:
    """Return a copy of a view: torch detaches stage outputs in place, which views do not allow."""
    return x.clone() if x._is_view() else x


def pack(sums: LossSums) -> Tensor:
    """Return the sums as one vector; fp64 counts tokens exactly."""
    return torch.stack([value.double() for value in sums])


def unpack(vector: Tensor) -> LossSums:
    """Return the sums of a packed vector."""
    return LossSums(*vector.unbind())


def make_transformer_stage(shell: nn.Module) -> nn.Module:
    """Give a shallow copy of a `Transformer` the forward of a stage."""
    shell.__class__ = TransformerStage
    return shell
