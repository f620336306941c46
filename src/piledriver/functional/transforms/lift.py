"""Transforms as modules: they stand in a model like any other and handle variables, keys and names.

- `Remat(module)` recomputes the module in the backward pass; it adds no level to the names.
- `Scanned(module, length)` runs `length` copies one after the other; their variables are stacked in one tree.
- `Vmapped(module, size)` runs `size` copies side by side over a dimension of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from piledriver.functional.errors import InputShapeError, TransformError, dotted
from piledriver.functional.frame import Context, Declaration, Frame, Place
from piledriver.functional.module import Module, bound_at
from piledriver.functional.random.keys import Key, fold_in, split
from piledriver.functional.transforms.remat import recomputed
from piledriver.functional.transforms.tracing import counted
from piledriver.functional.tree import Tree, leaves_of

Written = dict[Place, Any]


class Remat(Module):
    """Recompute `inner` in the backward pass instead of keeping its intermediate values."""

    inner: Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_initialising:
            return self.inner.within(self)(*args, **kwargs)
        frame = self._bound_frame("remat")
        call = recomputed(_pure(self.inner, frame))
        output, written = call(frame.variables(), frame.streams(), args, kwargs)
        frame.context.written.update(written)
        return output


class Scanned(Module):
    """`length` copies of `inner`, each with its own slice of the stacked variables, each fed the one before.

    The first argument is carried; the others go to every copy. With `has_outputs` the inner module returns
    `(carry, output)` and the outputs come back stacked. `axis` names the stacked dimension for `partitioning`.
    """

    inner: Module
    length: int
    has_outputs: bool = False
    axis: str | None = "layers"

    def __call__(self, carry: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the last carry, and the stacked outputs with `has_outputs`."""
        frame = self._bound_frame("scan")
        if self.is_initialising:
            if self.length < 1:
                raise TransformError(f"{dotted(frame.path)}: {self.length} scanned layers", fix="give one or more")
            result, declared = _inferred(self.inner, frame, (carry, *args), kwargs)
            _check_carry(carry, result[0] if self.has_outputs else result, frame)
            _declare_stacked(frame, declared, self.length, self.axis, frozenset())
            if not self.has_outputs:
                return result
            return result[0], pytree.tree_map(lambda one: torch.stack([one] * self.length), result[1])
        call = _pure(self.inner, frame)
        slices = _unstacked(frame.variables(), self.length, frame)
        outputs, writes, streams = [], [], frame.streams()
        for i in range(self.length):
            rngs = {stream: fold_in(key, i) for stream, key in streams.items()}
            carry, written = call(slices[i], rngs, (carry, *args), kwargs)
            if self.has_outputs:
                carry, output = carry
                outputs.append(output)
            writes.append(written)
        frame.context.written.update(_stacked(writes))
        return (carry, _stacked(outputs)) if self.has_outputs else carry


class Vmapped(Module):
    """`size` copies of `inner` side by side over dimension `in_axes` of the inputs (None: the same input for all).

    Collections in `shared` and streams in `shared_streams` are one for all copies; every other is stacked and split.
    """

    inner: Module
    size: int
    in_axes: int | tuple[Any, ...] | None = 0
    out_axes: int = 0
    shared: tuple[str, ...] = ()
    shared_streams: tuple[str, ...] = ()
    axis: str | None = None

    def __call__(self, *args: Any) -> Any:
        """Return the outputs of all copies, stacked."""
        frame = self._bound_frame("vmap")
        axes = self.in_axes if isinstance(self.in_axes, tuple) else (self.in_axes,) * len(args)
        _check_mapped(args, axes, self.size, frame)
        if self.is_initialising:
            one = tuple(
                arg if axis is None else pytree.tree_map_only(Tensor, _first(axis), arg)
                for arg, axis in zip(args, axes, strict=True)
            )
            result, declared = _inferred(self.inner, frame, one, {})
            _declare_stacked(frame, declared, self.size, self.axis, frozenset(self.shared))
            return pytree.tree_map(lambda out: torch.stack([out] * self.size, dim=self.out_axes), result)
        variables = frame.variables()
        rngs = {
            stream: key if stream in self.shared_streams else split(key, self.size)
            for stream, key in frame.streams().items()
        }
        call = _pure(self.inner, frame)
        over = (
            {name: None if name in self.shared else 0 for name in variables},
            {stream: None if stream in self.shared_streams else 0 for stream in rngs},
            axes,
        )
        mapped = torch.func.vmap(lambda v, r, a: call(v, r, a, {}), in_dims=over, out_dims=(self.out_axes, 0))
        output, written = counted("batch", mapped)(variables, rngs, args)
        frame.context.written.update(written)
        return output


def _check_carry(carry: Any, result: Any, frame: Frame) -> None:
    before, after = (
        [tuple(leaf.shape) for leaf in leaves_of(one) if isinstance(leaf, Tensor)] for one in (carry, result)
    )
    if before != after:
        raise InputShapeError(
            frame.path,
            f"a scanned module was given {before} and returned {after}",
            "each copy is fed by the one before: return what was given, or say has_outputs=True and return a pair",
        )


def _check_mapped(args: tuple[Any, ...], axes: tuple[Any, ...], size: int, frame: Frame) -> None:
    if len(axes) != len(args):
        raise InputShapeError(frame.path, f"{len(args)} inputs with {len(axes)} in_axes", "give each its axis, or None")
    for arg, axis in zip(args, axes, strict=True):
        for leaf in leaves_of(arg) if isinstance(axis, int) else ():
            if isinstance(leaf, Tensor) and (leaf.ndim <= axis or leaf.shape[axis] != size):
                raise InputShapeError(
                    frame.path,
                    f"an input of shape {tuple(leaf.shape)} for {size} copies over dimension {axis}",
                    "make that dimension as long as there are copies, or say in_axes=None to give all the same",
                )


def _pure(module: Module, frame: Frame) -> Callable[..., tuple[Any, Written]]:
    """Return the module at this frame as a function of variables and keys; what it writes is returned too."""
    mutable, hook, sharding, prefix = frame.context.mutable, frame.context.hook, frame.context.sharding, frame.path

    def call(
        variables: Mapping[str, Tree], rngs: Mapping[str, Key], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Written]:
        stores = {name: tree._data for name, tree in variables.items()}
        inner = Context(stores, rngs, mutable, hook=hook, sharding=sharding)
        output = bound_at(module, Frame(inner, None, "", prefix))(*args, **kwargs)
        return output, inner.written

    return call


def _inferred(
    module: Module, frame: Frame, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[Place, Declaration]]:
    """Infer the shapes of one copy, apart from the surrounding declarations."""
    inner = Context({}, {}, None, declared={}, device=frame.context.device, hook=frame.context.hook)
    output = bound_at(module, Frame(inner, None, "", frame.path))(*args, **kwargs)
    assert inner.declared is not None
    return output, inner.declared


def _declare_stacked(
    frame: Frame, declared: Mapping[Place, Declaration], size: int, axis: str | None, shared: frozenset[str]
) -> None:
    assert frame.context.declared is not None
    for place, one in declared.items():
        if one.collection in shared:
            frame.context.declared[place] = one
            continue

        def make(key: Key, device: torch.device, one: Declaration = one) -> Tensor:
            return torch.stack([one.make(part, device) for part in split(key, size)])

        axes = None if one.axes is None else (axis, *one.axes)
        frame.context.declared[place] = Declaration(one.collection, one.path, (size, *one.shape), one.dtype, axes, make)


def _unstacked(variables: Mapping[str, Tree], length: int, frame: Frame) -> list[dict[str, Tree]]:
    leaves, structure = pytree.tree_flatten(dict(variables))
    for leaf in leaves:
        if leaf.shape[:1] != (length,):
            raise TransformError(
                f"{'.'.join(frame.path) or '(root)'}: a stacked variable has the shape {tuple(leaf.shape)}",
                fix=f"its first dimension must be the number of scanned layers, {length}",
            )
    columns = [torch.unbind(leaf) for leaf in leaves]
    return [pytree.tree_unflatten([column[i] for column in columns], structure) for i in range(length)]


def _stacked(values: list[Any]) -> Any:
    return pytree.tree_map(lambda *parts: torch.stack(parts), *values) if values else {}


def _first(axis: int) -> Callable[[Tensor], Tensor]:
    return lambda value: value.select(axis, 0)
