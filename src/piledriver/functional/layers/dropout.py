"""Dropout from a key: the mask is a pure function of key and position, on every device and in every sharding."""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.functional.errors import InputShapeError
from piledriver.functional.module import Module
from piledriver.functional.random.keys import Key, bernoulli


class Dropout(Module):
    """Zero each number with probability `rate` and scale the rest (Srivastava et al., 2014).

    `broadcast_dims` share one decision along a dimension.
    """

    rate: float
    broadcast_dims: tuple[int, ...] = ()
    deterministic: bool | None = None
    stream: str = "dropout"

    def __call__(self, x: Tensor, deterministic: bool | None = None, key: Key | None = None) -> Tensor:
        """Drop, or return the input where `deterministic` is true; the argument wins over the field."""
        if not 0.0 <= self.rate <= 1.0:
            raise InputShapeError(self.path, f"Dropout at the rate {self.rate}", "use a rate from 0 to 1")
        quiet = self.deterministic if deterministic is None else deterministic
        if quiet is None:
            raise InputShapeError(
                self.path, "Dropout has no `deterministic`", "pass deterministic=True (evaluation) or False"
            )
        if quiet or self.rate == 0.0:
            return x
        return dropped(x, self.rate, self.make_key(self.stream) if key is None else key, self.broadcast_dims)


def dropped(x: Tensor, rate: float, key: Key, broadcast_dims: tuple[int, ...] = ()) -> Tensor:
    """Return the input with numbers zeroed at this rate and the rest scaled up."""
    if rate >= 1.0:
        return torch.zeros_like(x)
    shared = {dim % x.ndim for dim in broadcast_dims}
    shape = [1 if dim in shared else size for dim, size in enumerate(x.shape)]
    keep = sharded_like(bernoulli(key, 1.0 - rate, shape, device=x.device), x)
    return torch.where(keep, x * (1.0 / (1.0 - rate)), 0.0)


def replicated_like(value: Tensor, other: Tensor) -> Tensor:
    """Return a tensor that every rank computed alike as a replicated DTensor, if the other is a DTensor."""
    mesh = getattr(other, "device_mesh", None)
    if mesh is None or hasattr(value, "placements"):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def sharded_like(value: Tensor, other: Tensor) -> Tensor:
    """Return a tensor that every rank computed alike, with the placements of another one, without communication."""
    placements = getattr(other, "placements", None)
    if placements is None:
        return value
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    # Where the mask is broadcast along a sharded dimension there is nothing to cut.
    cut = [p if isinstance(p, Shard) and value.shape[p.dim] > 1 else Replicate() for p in placements]
    return distribute_tensor(value, other.device_mesh, cut, src_data_rank=None)  # type: ignore[attr-defined]
