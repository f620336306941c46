"""Infer the shapes between stages, once per batch shape, by running each stage on zeros of the previous shapes.

Runs without gradients, in evaluation mode, and restores random states. Results are broadcast, so that all ranks raise
the same error if a stage rejects its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from piledriver.engine.errors import EngineError
from piledriver.engine.faults.failed_step import discard_step
from piledriver.engine.pipeline_parallel.microbatches import MicroBatch

Run = Callable[[tuple[Tensor, ...], MicroBatch], Any]


class StageOutOfMemoryError(EngineError, torch.OutOfMemoryError):
    """A stage ran out of memory for a batch; raised on every rank, so that the loop can retry with a smaller one."""


@dataclass(frozen=True)
class Meta:
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """Return the shape and dtype of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def on_meta(self) -> Tensor:
        """Return a meta tensor, which requires a gradient if it is floating point."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.dtype.is_floating_point)

    def zeros(self, device: torch.device) -> Tensor:
        """Return a tensor of zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


def find_shapes(
    stages: dict[int, nn.Module],
    runs: dict[int, Run],
    rank_of: list[int],
    example: MicroBatch,
    pp: DeviceMesh,
    device: torch.device,
) -> list[tuple[Meta, ...]]:
    """Return the outputs of every stage. `stages` and `runs` are those of this rank, by index."""
    group = pp.get_group()
    found: list[tuple[Meta, ...]] = []
    for number, owner in enumerate(rank_of):
        told: list[Any] = [None]
        if number in runs:
            inputs = example.inputs if number == 0 else tuple(meta.zeros(device) for meta in found[-1])
            told = [_try(number, stages[number], runs[number], inputs, example)]
        dist.broadcast_object_list(told, src=dist.get_global_rank(group, owner), group=group)
        if isinstance(told[0], _StageFailure):
            told[0].raise_()
        found.append(told[0])
    return found


@dataclass(frozen=True)
class _StageFailure:
    """Why a stage cannot run a batch; broadcast, and raised on every rank."""

    what: str
    out_of_memory: bool = False

    def raise_(self) -> NoReturn:
        if self.out_of_memory:
            raise StageOutOfMemoryError(self.what, fix="use smaller batches or more microbatches")
        raise EngineError(self.what, fix="make each module accept the outputs of the one before it")


def _try(
    number: int, stage: nn.Module, run: Run, inputs: tuple[Tensor, ...], example: MicroBatch
) -> tuple[Meta, ...] | _StageFailure:
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng(devices=_accelerators(inputs)))
            # Do not compile for this one run.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.callback(_restore_modes, {module: module.training for module in stage.modules()})
            stage.eval()
            outputs = run(inputs, example)
        tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
        strange = next((type(one).__name__ for one in tensors if not isinstance(one, Tensor)), None)
        if strange is not None:
            return _StageFailure(f"stage {number} returns a {strange}: only tensors can be sent between stages")
        return tuple(Meta.of(tensor) for tensor in tensors)
    except Exception as error:
        if isinstance(stage, FSDPModule):
            discard_step(stage, gradients=False)
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if isinstance(error, torch.OutOfMemoryError):
            return _StageFailure(f"stage {number} has no memory for a micro-batch of {shapes}: {reason}", True)
        return _StageFailure(f"stage {number} rejects the outputs of the stage before it ({shapes}): {reason}")
    finally:
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _restore_modes(modes: dict[nn.Module, bool]) -> None:
    for module, training in modes.items():
        module.training = training


def _accelerators(inputs: tuple[Tensor, ...]) -> list[torch.device]:
    return list({tensor.device for tensor in inputs if tensor.device.type != "cpu"})
