"""Copies of tensors that training may change while a thread writes them out.

Buffers are kept from one save to the next: pinning memory and touching fresh pages cost more than the copy. On a GPU
the copies are queued together and waited for once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Named = tuple[str, torch.Tensor]


class Stage:
    """Host buffers for one rank's part of a checkpoint.

    >>> stage = Stage(); weight = torch.ones(2)
    >>> (name, copy), = stage.copies([("w", weight)])
    >>> _ = weight.zero_(); copy
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copies(self, tensors: Sequence[Named]) -> list[Named]:
        """The tensors as they are now, in host memory. Valid until the next call."""
        wanted = {name for name, _ in tensors}
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in wanted}
        devices: set[torch.device] = set()
        copied: list[Named] = []
        with torch.no_grad():
            for name, tensor in tensors:
                buffer = self._buffer(name, tensor)
                if tensor.device.type != "cpu":
                    devices.add(tensor.device)
                buffer.copy_(tensor, non_blocking=tensor.device.type == "cuda")
                copied.append((name, buffer))
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return copied

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pin = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
            self._buffers[name] = buffer
        return buffer
