"""Train a pruned model without filling its zeros: their gradients are set to zero.

The mask of a weight follows from the zeros of the model folder that the run starts from. Each rank makes that of its
own shard, so it holds in every layout; a run that resumes makes the same masks from the same folder, whatever values
its checkpoint has.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piledriver.core.errors import ConfigError
from piledriver.engine.shards.owned_rows import optimizer_tensors
from piledriver.optim import capabilities
from piledriver.optim.shards import local


class KeptZeros:
    """Zeros of the weights of a model's blocks, on this rank.

    >>> layer = nn.ModuleDict({"blocks": nn.Linear(2, 1, bias=False)})
    >>> _ = layer["blocks"].weight.data.copy_(torch.tensor([[0.0, 2.0]]))
    >>> zeros = KeptZeros(layer)
    >>> layer["blocks"](torch.ones(1, 2)).sum().backward()
    >>> zeros.mask_gradients()
    >>> layer["blocks"].weight.grad
    tensor([[0., 1.]])
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        weights = [
            parameter
            for name, parameter in model.named_parameters()
            if "blocks" in name.split(".") and parameter.dim() > 1 and parameter.requires_grad
        ]
        self._masks: list[tuple[Tensor, Tensor]] = []
        for tensor in optimizer_tensors(weights):
            zeros = local(tensor) == 0
            if bool(zeros.any()):
                self._masks.append((tensor, zeros))

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Set the gradients of the zeros to zero, before clipping."""
        for tensor, zeros in self._masks:
            gradient = tensor.grad
            if gradient is None:
                continue
            if isinstance(gradient, DTensor) and isinstance(tensor, DTensor):
                gradient = tensor.grad = gradient.redistribute(tensor.device_mesh, tensor.placements)
            local(gradient).masked_fill_(zeros.to(local(gradient).device), 0.0)


def check_keeps_zeros(optimizer: torch.optim.Optimizer, *, offloads: bool, folder: str | None) -> None:
    """Raise `ConfigError` if a step could fill zeros whose gradients are zero."""
    if folder is None:
        raise ConfigError("keep_zeros without a model folder", fix="let model name the folder of a pruned model")
    if not capabilities(optimizer).elementwise:
        raise ConfigError(
            f"keep_zeros with {type(optimizer).__name__}, whose step mixes the weights of a matrix",
            fix="use optimizer.kind=adamw or lion",
        )
    if offloads:
        raise ConfigError("keep_zeros with an offloaded optimizer", fix="remove layout.offload")
