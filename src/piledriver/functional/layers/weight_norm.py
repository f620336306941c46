"""Reparametrised weights: wrappers that normalise the parameters of a layer before each call.

The layer's own parameters lie under `layer`; those of the wrapper beside it, named after the parameter that they scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from piledriver.functional.errors import InputShapeError, MissingCollectionError
from piledriver.functional.frame import Frame, Initialiser
from piledriver.functional.initialisers import ones, scaled_normal
from piledriver.functional.layers.linear import promoted
from piledriver.functional.module import Module, bound_at
from piledriver.functional.tree import Path, Tree, map_with_path


class WeightNorm(Module):
    """A layer whose weights are split into direction and length (Salimans and Kingma, 2016).

    The parameters whose path contains a name of `names` (None: all) have norm 1 over every dimension but
    `feature_dims`, times a learned `scale`.
    """

    layer: Module
    epsilon: float = 1e-12
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    use_scale: bool = True
    scale_init: Initialiser = ones
    feature_dims: int | tuple[int, ...] | None = -1
    names: tuple[str, ...] | None = ("kernel",)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call_with(self, self.layer, self._normalised, args, kwargs)

    def _normalised(self, path: Path, value: Tensor) -> Tensor:
        if self.names is not None and not any(name in part for name in self.names for part in path):
            return value
        given = () if self.feature_dims is None else self.feature_dims
        features = {dim % value.ndim for dim in ((given,) if isinstance(given, int) else given)}
        reduced = [dim for dim in range(value.ndim) if dim not in features]
        squares = value.square().sum(reduced, keepdim=True) if reduced else value.square()
        out = value * torch.rsqrt(squares + self.epsilon)
        if not self.use_scale:
            return out if self.dtype is None else out.to(self.dtype)
        shape = tuple(size for dim, size in enumerate(value.shape) if dim in features)
        scale = self.param("/".join(("layer", *path, "scale")), self.scale_init, shape, self.param_dtype)
        spread = [size if dim in features else 1 for dim, size in enumerate(value.shape)]
        out, scale = promoted(self.dtype, out, scale)
        return out * scale.reshape(spread)


class SpectralNorm(Module):
    """A layer whose matrices have a largest singular value of 1 (Miyato et al., 2018).

    Power iteration starts from the vectors in `collection`; with `update_stats` the new ones are written back, so call
    `apply(..., mutable=["batch_stats"])`. Kernels of more dimensions are matrices of (all others, last).
    """

    layer: Module
    steps: int = 1
    epsilon: float = 1e-12
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    error_on_non_matrix: bool = False
    collection: str = "batch_stats"

    def __call__(self, *args: Any, update_stats: bool, **kwargs: Any) -> Any:
        def normalised(path: Path, value: Tensor) -> Tensor:
            return self._normalised(path, value, update_stats)

        return _call_with(self, self.layer, normalised, args, kwargs)

    def _normalised(self, path: Path, value: Tensor, update_stats: bool) -> Tensor:
        if value.ndim < 2 or self.steps < 1:
            return value
        if value.ndim > 2 and self.error_on_non_matrix:
            raise InputShapeError(
                self.path, f"{'.'.join(path)} has {value.ndim} dimensions", "set error_on_non_matrix=False"
            )
        matrix = value.reshape(-1, value.shape[-1])
        frame, name = self._bound_frame("spectral norm"), "/".join(("layer", *path))
        if self.is_initialising:
            self._declare(frame, f"{name}/u", (1, matrix.shape[-1]), scaled_normal(1.0))
            self._declare(frame, f"{name}/sigma", (), ones)
            return value
        u = frame.read(self.collection, f"{name}/u")
        if u is None:
            raise MissingCollectionError(self.collection, frame.path, frame.context.stores)
        for _ in range(self.steps):
            v = self._unit(u @ matrix.mT)
            u = self._unit(v @ matrix)
        u, v = u.detach(), v.detach()
        sigma = (v @ matrix @ u.mT)[0, 0]
        if update_stats:
            frame.write(self.collection, f"{name}/u", u)
            frame.write(self.collection, f"{name}/sigma", sigma.detach())
        out, _ = promoted(self.dtype, value / torch.where(sigma != 0, sigma, 1.0), sigma)
        return out

    def _declare(self, frame: Frame, name: str, shape: tuple[int, ...], init: Initialiser) -> None:
        dtype = self.param_dtype
        frame.declare(self.collection, name, shape, dtype, None, lambda key, device: init(key, shape, dtype, device))

    def _unit(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum() + self.epsilon)


def _call_with(
    wrapper: Module,
    layer: Module,
    change: Callable[[Path, Tensor], Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a layer under the name `layer` with its parameters changed, or declare both while shapes are inferred."""
    frame = wrapper._bound_frame("the wrapped layer")
    if wrapper.is_initialising:
        output = wrapper.child("layer", layer)(*args, **kwargs)
        assert frame.context.declared is not None
        own = (*frame.path, "layer")
        for (collection, path), one in list(frame.context.declared.items()):
            if collection == "params" and path[: len(own)] == own:
                change(path[len(own) :], torch.empty(one.shape, dtype=one.dtype, device=frame.context.device))
        return output
    frame.claim("child", "layer")
    inner = Frame(frame.context, frame, "layer")
    params = frame.subtree("params")
    if params is not None and isinstance(params.get("layer"), Tree):
        inner.params = map_with_path(change, params["layer"])._data
    return bound_at(layer, inner)(*args, **kwargs)
