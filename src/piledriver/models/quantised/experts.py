"""Experts with quantised weights: codes at rest, dequantised for each product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from piledriver.kernels.linear import QuantisedWeight
from piledriver.models.feed_forward.moe import Experts
from piledriver.models.quantised.linear import QuantisedLinear


class StackedCodes(QuantisedLinear):
    """The codes of one matrix of all experts: rows of one expert follow those of the one before it."""

    def __init__(self, quantised: QuantisedWeight, count: int) -> None:
        super().__init__(quantised)
        self.count = count

    def dense(self) -> Tensor:
        """Return [experts, rows, columns] in the dtype of the scales."""
        return torch.unflatten(super().dense(), 0, (self.count, -1))


class QuantisedExperts(Experts):
    """`Experts` whose matrices are stored in 8 or 4 bits; inference only.

    They take the memory of their codes; a product reads them dequantised, one block's experts at a time.
    """

    def __init__(self, experts: Experts, gate_up: StackedCodes, down: StackedCodes) -> None:
        nn.Module.__init__(self)
        self.count, self.block = experts.count, experts.block
        self.activation, self.limit, self.gated = experts.activation, experts.limit, experts.gated
        self.gate_up_codes, self.down_codes = gate_up, down
        self.register_parameter("gate_up_bias", experts.gate_up_bias)

    @property
    def gate_up(self) -> Tensor:  # type: ignore[override]
        """[experts, rows, dim]."""
        return self.gate_up_codes.dense()

    @property
    def down(self) -> Tensor:  # type: ignore[override]
        """[experts, dim, width]."""
        return self.down_codes.dense()


def replace_experts(model: nn.Module, name: str, gate_up: StackedCodes, down: StackedCodes) -> None:
    """Put quantised experts in the place of the experts `name`."""
    owner, _, last = name.rpartition(".")
    experts = model.get_submodule(name)
    assert isinstance(experts, Experts)
    setattr(model.get_submodule(owner), last, QuantisedExperts(experts, gate_up, down))
