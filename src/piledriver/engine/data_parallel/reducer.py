"""Average gradients over replicas in buckets, overlapped with the backward.

Zero 0 and 1: every rank ends with the full mean. Zero 2: each ends with its rows of the mean, and full gradients are
freed as their bucket is sent. Unlike torch DDP's reducer, this one handles `DTensor`s, experts and row shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piledriver.engine.mesh import Mesh
from piledriver.engine.shards.grad_hooks import when_accumulated
from piledriver.engine.shards.owned_rows import (
    BUCKET_BYTES,
    accumulate_shard_gradient,
    chunk_elements,
    expose_shard_gradient,
    is_expert,
    reduce_scatter,
    rows_in_chunks,
    shard_axis,
    wrapped_like,
)
from piledriver.engine.torch_private import call_after_backward, current_backward
from piledriver.optim.shards import local


class GradientReducer:
    """Reduces the gradients of parameters in each backward, until `release`."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        mesh: Mesh,
        *,
        scatter: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.enabled = True
        self.mesh = mesh
        held = [parameter for parameter in parameters if parameter.requires_grad]
        # The backward reaches the last parameters first.
        self.buckets = [
            Bucket(members, mesh, scatter=scatter and shard_axis(members[0], mesh) is not None)
            for members in _make_buckets(held[::-1], bucket_bytes)
        ]
        self._arrived: set[int] = set()
        self._sent = 0
        self._backward: int | None = None
        self._handles = [when_accumulated(parameter, self._on_gradient) for parameter in held]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Keep gradients local within the block."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @contextmanager
    def on(self) -> Iterator[None]:
        """Average within the block, even inside `off`."""
        before, self.enabled = self.enabled, True
        try:
            yield
        finally:
            self.enabled = before

    def synchronise(self) -> None:
        """Average accumulated gradients now, for backwards whose hooks were off (pipeline schedules)."""
        self._finish()

    def drop(self) -> None:
        """Discard what a failed backward has sent."""
        self._begin(None)

    def release(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: Any) -> None:
        # A copy of the model is in no process group.
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self.enabled:
            return
        backward = current_backward()
        if backward != self._backward:
            # The previous backward may have failed (an OOM that the loop caught), without its final callback.
            self._begin(backward)
            call_after_backward(self._finish)
        self._arrived.add(id(parameter))
        # In the same order on every rank, whatever order gradients arrive in.
        while self._sent < len(self.buckets) and self.buckets[self._sent].keys <= self._arrived:
            self.buckets[self._sent].send()
            self._sent += 1

    def _begin(self, backward: int | None) -> None:
        self._backward = backward
        self._arrived.clear()
        self._sent = 0
        for bucket in self.buckets:
            bucket.drop()

    @torch.no_grad()
    def _finish(self) -> None:
        for bucket in self.buckets[self._sent :]:
            bucket.send()
        for bucket in self.buckets:
            bucket.receive()
        self._begin(None)


class Bucket:
    """Parameters whose gradients are reduced together."""

    def __init__(self, parameters: list[nn.Parameter], mesh: Mesh, *, scatter: bool) -> None:
        self.parameters = parameters
        self.keys = {id(parameter) for parameter in parameters}
        self.axes = mesh.expert_dp_groups if is_expert(parameters[0]) else mesh.dp_groups
        self.divisor = mesh.reduce_size
        self.scatter = scatter
        # 16-bit sums would lose precision, and gloo has none.
        self.reduce_dtype = torch.float32 if parameters[0].dtype.itemsize == 2 else parameters[0].dtype
        self._flat: Tensor | None = None
        self._work: Any = None
        self._missing: list[bool] = []

    @torch.no_grad()
    def send(self) -> None:
        """Copy the gradients into one buffer and start its reduction over the first axis."""
        gradients = [_local_gradient(parameter) for parameter in self.parameters]
        if all(gradient is None for gradient in gradients) and not self.axes:
            return
        self._missing = [gradient is None for gradient in gradients]
        flags = self._flags()
        if self.scatter:
            self._send_rows(gradients, flags)
        else:
            pieces = [
                local(parameter).new_zeros(local(parameter).numel()) if gradient is None else gradient.flatten()
                for parameter, gradient in zip(self.parameters, gradients, strict=True)
            ]
            self._flat = torch.cat([*pieces, flags]).to(self.reduce_dtype)
            del pieces, gradients
            self._expose_views()
            if self.axes:
                self._work = dist.all_reduce(self._flat, group=self.axes[0].get_group(), async_op=True)

    def _send_rows(self, gradients: list[Tensor | None], flags: Tensor) -> None:
        size = self.axes[0].size()
        rows = [
            rows_in_chunks(local(parameter) if gradient is None else gradient, size, zero=gradient is None)
            for parameter, gradient in zip(self.parameters, gradients, strict=True)
        ]
        buffer = torch.cat([*rows, flags.expand(size, -1)], dim=1).to(self.reduce_dtype)
        del rows, gradients
        for parameter in self.parameters:
            parameter.grad = None
        self._flat = buffer.new_empty(buffer.shape[1])
        self._work = reduce_scatter(self._flat, buffer.flatten(), group=self.axes[0].get_group())

    def drop(self) -> None:
        """Discard what is in flight."""
        if self._work is not None:
            self._work.wait()
        self._flat = self._work = None

    @torch.no_grad()
    def receive(self) -> None:
        """Wait, reduce over the other axes and divide; gradients that no rank had stay None."""
        flat, self._flat = self._flat, None
        if flat is None:
            return
        if self._work is not None:
            self._work.wait()
            self._work = None
        for axis in self.axes[1:]:
            dist.all_reduce(flat, group=axis.get_group())
        values, flags = flat[: -len(self.parameters)], flat[-len(self.parameters) :]
        if self.divisor > 1:
            values.div_(self.divisor)
        if self.scatter:
            self._keep_rows(values, flags)
            return
        if self._flat_dtype_differs:
            self._cast_back(values)
        for parameter, present in zip(self.parameters, self._present(flags), strict=True):
            if not present:
                parameter.grad = None
            expose_shard_gradient(parameter)

    @property
    def _flat_dtype_differs(self) -> bool:
        # Offloaded matrices are cast to the compute dtype after buckets were made; vectors of a bucket stay fp32.
        return any(parameter.dtype != self.reduce_dtype for parameter in self.parameters)

    def _cast_back(self, values: Tensor) -> None:
        """Cast the means from `reduce_dtype` to the parameters' dtype."""
        begin = 0
        for parameter in self.parameters:
            shape = local(parameter).shape
            mean = values[begin : begin + shape.numel()].view(shape).to(parameter.dtype)
            parameter.grad = wrapped_like(parameter, mean)
            begin += shape.numel()

    def _flags(self) -> Tensor:
        """Return ones for gradients that exist, made on the device to avoid a host sync."""
        like = local(self.parameters[0]).detach()
        if not any(self._missing):
            return like.new_ones(len(self.parameters))
        return torch.cat([like.new_zeros(1) if missing else like.new_ones(1) for missing in self._missing])

    def _present(self, flags: Tensor) -> list[bool]:
        """Return which gradients some rank had; needs a host sync only if one is missing here."""
        if not any(self._missing):
            return [True] * len(self.parameters)
        return [present > 0 for present in flags.tolist()]

    def _expose_views(self) -> None:
        """Make the gradients views of the buffer, which saves a copy back and its memory."""
        assert self._flat is not None
        if self._flat_dtype_differs:
            return
        begin = 0
        for parameter in self.parameters:
            shape = local(parameter).shape
            parameter.grad = wrapped_like(parameter, self._flat[begin : begin + shape.numel()].view(shape))
            begin += shape.numel()

    def _keep_rows(self, values: Tensor, flags: Tensor) -> None:
        begin = 0
        for parameter, present in zip(self.parameters, self._present(flags), strict=True):
            length = chunk_elements(parameter, self.axes[0].size())
            if present:
                accumulate_shard_gradient(parameter, values[begin : begin + length].to(parameter.dtype))
            begin += length


def _local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the local gradient, in the placements of its parameter."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
        return gradient.to_local()
    return gradient


def _make_buckets(parameters: list[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """Group consecutive parameters of one dtype, device and kind, up to a size."""
    filling: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    full: list[list[nn.Parameter]] = []
    for parameter in parameters:
        key = (parameter.dtype, parameter.device, is_expert(parameter), parameter.dim() == 0)
        members = filling.setdefault(key, [])
        members.append(parameter)
        if sum(local(one).nbytes for one in members) >= most_bytes:
            full.append(filling.pop(key))
    return full + list(filling.values())
