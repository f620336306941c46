"""Memory of a rank by category: parameters, gradients, optimizer states, and the rest of the peak."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_GIB = 2**30


class MemoryParts:
    """Bytes of this rank's tensors on its device, by category. Tensors on the host (offloaded) are not counted.

    The sizes are those of the first steps, after which they stay: parameters and gradients are fixed, optimizer states
    exist after the first step.
    """

    def __init__(self, model: nn.Module, optimizer: Any, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._known: dict[str, int] | None = None

    def figures(self, peak_bytes: int, step: int, first: int) -> dict[str, float]:
        """Return `memory/..._gib` for a step whose peak is known; what no category owns is `memory/activations_gib`.

        That last part holds activations, workspaces and, on a CPU, what else the process allocated since the run began.
        """
        if self._known is None or step <= first + 2:
            parameters = list(self._model.parameters())
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            self._known = {
                "parameters": self._bytes(parameters),
                "gradients": self._bytes(trained),
                "optimizer": self._bytes(_tensors(self._optimizer)),
            }
        rest = max(0, peak_bytes - sum(self._known.values()))
        parts = {**self._known, "activations": rest}
        return {f"memory/{name}_gib": size / _GIB for name, size in parts.items()}

    def _bytes(self, tensors: Iterable[Tensor]) -> int:
        seen: dict[int, int] = {}
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if local.device.type == self._device.type:
                seen[id(local)] = local.numel() * local.element_size()
        return sum(seen.values())


def _tensors(optimizer: Any) -> list[Tensor]:
    inner = getattr(optimizer, "optimizer", optimizer)
    states = getattr(inner, "state", {})
    return [
        value
        for state in states.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, Tensor)
    ]
