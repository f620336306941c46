"""Parameters that are `DTensor`s, but that their module's `forward` reads as plain local tensors.

Optimizers, checkpoints and ZeRO see the `DTensor` with its global shape and placements. Code inside `forward`, compiled
or with fp8 kernels, needs to know nothing of parallelism.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from piledriver.engine.shards.collectives import Group, copy_to_region

Reader = Callable[[Tensor], Tensor]


def part(parameter: Tensor) -> Tensor:
    """Return the local shard of a parameter as a plain, differentiable tensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def place_parameter(
    module: nn.Module,
    name: str,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    placed: dict[nn.Parameter, nn.Parameter],
    reader: Reader = part,
) -> None:
    """Shard one parameter, equal on all ranks, over a mesh; `forward` reads it through `reader`.

    `placed` maps old to new parameters, so that tied parameters stay tied.
    """
    parameter = module._parameters[name]
    if parameter is None:
        return
    if parameter not in placed and not isinstance(parameter, DTensor):
        # All ranks hold the same values: each keeps its shard without communication.
        laid = distribute_tensor(parameter.data, mesh, list(placements), src_data_rank=None)
        placed[parameter] = nn.Parameter(laid, requires_grad=parameter.requires_grad)
    module.register_parameter(name, placed.get(parameter, parameter))
    read_locally(module, name, reader)


def place_rest(model: nn.Module, mesh: DeviceMesh, placed: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replicate the remaining parameters over the same mesh: optimizers cannot mix `DTensor`s and tensors."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not isinstance(parameter, DTensor):
                place_parameter(module, name, mesh, [Replicate()], placed)


class SumGradient:
    """Reads a replicated parameter that each rank uses for a part of the work: gradients are all-reduced."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, parameter: Tensor) -> Tensor:
        return copy_to_region(part(parameter), self.group)


class ScaleGradient:
    """Reads a shard whose gradient is multiplied by a factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, parameter: Tensor) -> Tensor:
        return cast(Tensor, _scaled(part(parameter), self.factor))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


_scaled: Any = _Scaled.apply


class RowParallelBias:
    """Reads a bias that is added before an all-reduce: all ranks but the first add zeros.

    The gradient of the sum is full on every rank, so each keeps it as it is.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, parameter: Tensor) -> Tensor:
        here = part(parameter)
        return here if self.group.rank == 0 else cast(Tensor, _zero_forward(here))


class _ZeroForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


_zero_forward: Any = _ZeroForward.apply


def read_locally(module: nn.Module, name: str, reader: Reader = part) -> None:
    """Make the module's `forward` read its parameter `name` through `reader`."""
    first = "_readers" not in module.__dict__
    if first:
        module.__dict__["_readers"] = {}
        module.__dict__["_reads_locally"] = False
        module.register_forward_pre_hook(_begin, prepend=True)
        # Not `always_call`: its guard on the hook's id would compile every block anew.
        module.register_forward_hook(_end)
    module.__dict__["_readers"][name] = reader
    kind = type(module)
    if name not in kind.__dict__.get("_local_names", ()):
        names = (*kind.__dict__.get("_local_names", ()), name)
        base = kind.__mro__[1] if "_local_names" in kind.__dict__ else kind
        module.__class__ = _reading_class(base, names)


def reads_replicas(module: nn.Module) -> bool:
    """Return whether a module has no children, and no hooks but those by which it reads full parameters."""
    readers = module.__dict__.get("_readers", {})
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    replicas = all(
        isinstance(parameter, DTensor) and all(isinstance(one, Replicate) for one in parameter.placements)
        for parameter in module._parameters.values()
        if parameter is not None
    )
    known = readers.keys() == {name for name, parameter in module._parameters.items() if parameter is not None}
    return bool(readers) and known and replicas and hooks == [_begin, _end] and not module._modules


def plain_copy(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module in which local shards are plain parameters, and its forward reads them as such."""
    memo: dict[int, Any] = {id(reader): part for reader in module.__dict__.get("_readers", {}).values()}
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            memo[id(parameter)] = nn.Parameter(part(parameter.detach()).clone())
    return copy.deepcopy(module, memo)


@functools.cache  # one class for all blocks, so that they share one compilation
def _reading_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    space: dict[str, Any] = {name: _reading(name) for name in names}
    space["_local_names"] = names
    return type(base.__name__, (base,), space)


def _reading(name: str) -> property:
    def read(self: Any) -> Any:
        parameter = self._parameters[name]
        return self._readers[name](parameter) if self._reads_locally and parameter is not None else parameter

    return property(read)


def _begin(module: nn.Module, args: Any) -> None:
    module._reads_locally = True  # type: ignore[assignment]


def _end(module: nn.Module, args: Any, output: Any) -> None:
    module._reads_locally = False  # type: ignore[assignment]
