"""Debug check: the ranks of a model-parallel group (tp, cp, pp) must be given the same batch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from piledriver.engine.errors import EngineError
from piledriver.engine.mesh import Mesh


def check_same_batch(given: Any, axis: DeviceMesh) -> None:
    """Raise on every rank of a one-axis mesh if they were given different tensors."""
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    here = [(tuple(tensor.shape), float(tensor.double().sum()), _weighted(tensor)) for tensor in tensors]
    told: list[Any] = [None] * axis.size()
    dist.all_gather_object(told, here, group=axis.get_group())
    other = next((place for place, one in enumerate(told) if one != told[0]), None)
    if other is not None:
        ranks = dist.get_process_group_ranks(axis.get_group())
        name = axis.mesh_dim_names[0] if axis.mesh_dim_names else "model-parallel"
        first, second = ([one[:2] for one in told[place]] for place in (0, other))
        raise EngineError(
            f"ranks {ranks[0]} and {ranks[other]} of one {name} group were given different batches: shapes and sums "
            f"are {first} and {second}",
            fix="read the same batch on every rank of such a group (`mesh.data_rank` is its index)",
        )


def check_batches(model: nn.Module, mesh: Mesh) -> None:
    """Check before every forward of a model that the ranks of each tp and cp group were given the same batch."""
    axes = [axis for size, axis in ((mesh.layout.tp, mesh.tp), (mesh.layout.cp, mesh.cp)) if size > 1]
    for axis in axes:
        model.register_forward_pre_hook(_Check(axis), prepend=True, with_kwargs=True)


def uncheck_batches(model: nn.Module) -> None:
    """Undo `check_batches`."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _Check):
            del model._forward_pre_hooks[key]


class _Check:
    """The hook of `check_batches`; a copy of the model checks nothing."""

    def __init__(self, axis: DeviceMesh | None) -> None:
        self.axis = axis

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.axis is not None:
            check_same_batch((args, kwargs), self.axis)

    def __deepcopy__(self, memo: Any) -> _Check:
        return _Check(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Check, (None,)


def _weighted(tensor: Tensor) -> float:
    """Return a sum that depends on the order of the values, which a plain sum does not."""
    flat = tensor.detach().double().flatten()
    return float((flat * (flat.new_ones(()).expand_as(flat).cumsum(0) % 1021)).sum())
