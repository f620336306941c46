"""Copies of tensors in host memory, which a thread writes while training changes the originals.

Buffers are kept between saves: pinning memory and touching new pages cost more than the copy. On a GPU all copies are
queued, then synchronised once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

NamedTensor = tuple[str, torch.Tensor]


class HostStaging:
    """Host buffers for the chunks that one rank writes.

    >>> staging = HostStaging(); weight = torch.ones(2)
    >>> (name, copy), = staging.copies([("w", weight)])
    >>> _ = weight.zero_(); copy
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copies(self, tensors: Sequence[NamedTensor]) -> list[NamedTensor]:
        """Copy tensors to host memory and return the copies, valid until the next call."""
        wanted = {name for name, _ in tensors}
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in wanted}
        devices: set[torch.device] = set()
        copied: list[NamedTensor] = []
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
