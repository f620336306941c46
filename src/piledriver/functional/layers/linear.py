"""Linear maps: over the last dimension, over any dimensions, and by einsum.

`dtype` is what the layer computes in (None: what inputs and parameters promote to), `param_dtype` what it stores.
`*_axes` name the dimensions of a parameter for `partitioning`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from piledriver.functional.errors import InputShapeError
from piledriver.functional.frame import Axes, Initialiser
from piledriver.functional.initialisers import lecun_normal, zeros
from piledriver.functional.module import Module
from piledriver.functional.random.keys import Key
from piledriver.functional.tree import Path

_LECUN = lecun_normal()


class Dense(Module):
    """`x @ kernel + bias` over the last dimension; the kernel is stored as (inputs, features)."""

    features: int
    use_bias: bool = True
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    kernel_init: Initialiser = _LECUN
    bias_init: Initialiser = zeros
    kernel_axes: Axes | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if not x.shape:
            raise InputShapeError(self.path, "a number without dimensions", "pass (..., inputs)")
        kernel = self.param(
            "kernel", self.kernel_init, (x.shape[-1], self.features), self.param_dtype, self.kernel_axes
        )
        if not self.use_bias:
            x, kernel = promoted(self.dtype, x, kernel)
            return torch.matmul(x, kernel)
        axes = None if self.kernel_axes is None else self.kernel_axes[-1:]
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype, axes)
        x, kernel, bias = promoted(self.dtype, x, kernel, bias)
        return torch.nn.functional.linear(x, kernel.mT, bias)


class DenseGeneral(Module):
    """A linear map from the dimensions `dims` of the input to new trailing dimensions `features`.

    The kernel has the contracted dimensions in the input's order, not in that of `dims`.
    """

    features: int | tuple[int, ...]
    dims: int | tuple[int, ...] = -1
    use_bias: bool = True
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    kernel_init: Initialiser = _LECUN
    bias_init: Initialiser = zeros
    kernel_axes: Axes | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Contract `dims` with the kernel, whose shape is (contracted..., features...)."""
        features = (self.features,) if isinstance(self.features, int) else self.features
        count = 1
        if self.dims != -1 or not x.shape:
            x, count = _taken_last(x, self.dims, self.path)
        kept, taken = x.shape[:-count], tuple(x.shape[-count:])
        init = _flat_init(self.kernel_init, count) if self.is_initialising else self.kernel_init
        kernel = self.param("kernel", init, (*taken, *features), self.param_dtype, self.kernel_axes)
        rows, columns = math.prod(taken), math.prod(features)
        if not self.use_bias:
            x, kernel = promoted(self.dtype, x, kernel)
            flat = torch.matmul(x if count == 1 else x.reshape(*kept, rows), kernel.reshape(rows, columns))
        else:
            axes = None if self.kernel_axes is None else self.kernel_axes[count:]
            bias = self.param("bias", self.bias_init, features, self.param_dtype, axes)
            x, kernel, bias = promoted(self.dtype, x, kernel, bias)
            flat = torch.nn.functional.linear(
                x.reshape(*kept, rows), kernel.reshape(rows, columns).mT, bias.reshape(columns)
            )
        return flat.reshape(*kept, *features)


class Einsum(Module):
    """An einsum of the input with a kernel of a given shape: `Einsum((8, 64, 512), "btnh,nhd->btd")`.

    A bias of `bias_shape` broadcasts against the result.
    """

    shape: tuple[int, ...]
    equation: str
    bias_shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    kernel_init: Initialiser = _LECUN
    bias_init: Initialiser = zeros
    kernel_axes: Axes | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.equation.count(",") != 1 or "->" not in self.equation:
            raise InputShapeError(
                self.path, f"{self.equation!r} is not an einsum of two operands", "write it as 'abc,cd->abd'"
            )
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype, self.kernel_axes)
        x, kernel = promoted(self.dtype, x, kernel)
        out = torch.einsum(self.equation, x, kernel)
        if self.bias_shape is None:
            return out
        bias = self.param("bias", self.bias_init, self.bias_shape, self.param_dtype)
        return out + bias.to(out.dtype)


class DenseParameters(Module):
    """The kernel (inputs, *features) and bias that `Dense` or `DenseGeneral` would have, for layers that fuse products.

    The bias is None without `bias_init`.
    """

    features: int | tuple[int, ...]
    param_dtype: torch.dtype
    kernel_init: Initialiser
    bias_init: Initialiser | None = None
    kernel_axes: Axes | None = None

    def __call__(self, inputs: int) -> tuple[Tensor, Tensor | None]:
        features = (self.features,) if isinstance(self.features, int) else self.features
        init = _flat_init(self.kernel_init, 1) if self.is_initialising else self.kernel_init
        kernel = self.param("kernel", init, (inputs, *features), self.param_dtype, self.kernel_axes)
        if self.bias_init is None:
            return kernel, None
        return kernel, self.param("bias", self.bias_init, features, self.param_dtype)


def promoted(dtype: torch.dtype | None, *values: Tensor) -> list[Tensor]:
    """Return tensors in one dtype: the one given, else what they promote to."""
    if dtype is None:
        dtype = values[0].dtype
        for value in values[1:]:
            if value.dtype != dtype:
                dtype = torch.promote_types(dtype, value.dtype)
    return [value if value.dtype == dtype else value.to(dtype) for value in values]


def _taken_last(x: Tensor, dims: int | tuple[int, ...], path: Path) -> tuple[Tensor, int]:
    """Return the input with the contracted dimensions last, and how many they are."""
    given = (dims,) if isinstance(dims, int) else tuple(dims)
    chosen = tuple(sorted({dim + x.ndim if dim < 0 else dim for dim in given}))
    if len(chosen) != len(given) or not chosen or chosen[0] < 0 or chosen[-1] >= x.ndim:
        raise InputShapeError(
            path, f"cannot contract the dims {dims} of an input of shape {tuple(x.shape)}", "name each that it has once"
        )
    last = tuple(range(x.ndim - len(chosen), x.ndim))
    return (x if chosen == last else torch.movedim(x, chosen, last)), len(chosen)


def _flat_init(init: Initialiser, contracted: int) -> Initialiser:
    """Initialise as the flat matrix that the kernel stands for, so that the fans are the whole sums."""

    def flat(key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        rows = math.prod(shape[:contracted])
        return init(key, (rows, math.prod(shape[contracted:])), dtype, device).reshape(shape)

    return flat
