"""torch's `PipelineStage` with micro-batches from a list, and control over when gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from piledriver.engine.pipeline_parallel.infer_shapes import Meta
from piledriver.engine.pipeline_parallel.microbatches import MicroBatch
from piledriver.engine.pipeline_parallel.stages.transformer import own_memory

# Before 2.13 torch cannot split a backward at a custom autograd function, which our loss and layers have.
CAN_SPLIT_BACKWARD = torch.__version__ >= "2.13"

Keywords = Callable[[MicroBatch, bool], dict[str, Any]]


class ScheduledStage(PipelineStage):
    """One stage of one schedule."""

    def __init__(
        self,
        module: nn.Module,
        number: int,
        count: int,
        *,
        device: torch.device,
        inputs: tuple[Meta, ...],
        outputs: tuple[Meta, ...],
        keywords: Keywords,
        splits_backward: bool,
        group: Any,
    ) -> None:
        super().__init__(
            module,
            number,
            count,
            device,
            input_args=tuple(meta.on_meta() for meta in inputs),
            output_args=tuple(meta.on_meta() for meta in outputs),
            group=group,
            # Without a split backward there is no separate weight-gradient part.
            dw_builder=None if splits_backward and CAN_SPLIT_BACKWARD else lambda: _nothing,
        )
        self.microbatches: list[MicroBatch] = []
        self.reduces = True
        self._keywords = keywords
        self._now = 0

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Run one micro-batch. Keywords are added in `forward_maybe_with_nosync`: torch would want their gradients."""
        self._now = fwd_chunk_id
        # Before 2.13 torch rejects slices, as it checks strides.
        inputs = tuple(one.contiguous() for one in self.microbatches[fwd_chunk_id].inputs) if self.is_first else ()
        return super().forward_one_chunk(fwd_chunk_id, inputs, {}, save_forward_output)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        out = self.submod(*args, **self._keywords(self.microbatches[self._now], self.is_last))
        if isinstance(out, tuple | list):
            return tuple(own_memory(member) if isinstance(member, Tensor) else member for member in out)
        return own_memory(out) if isinstance(out, Tensor) else out

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Drop sends to this rank itself, which torch 2.11 plans for neighbouring stages and gloo rejects."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce gradients sharded by zero 3, only at the end of an accumulation window."""
        if self.reduces and self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)


def _nothing() -> None:
    pass
