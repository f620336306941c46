"""Logits that are computed only if they are read: a cross-entropy of them runs in chunks and never holds them.

`LazyLogits` is a tensor without values that knows the input and the weight of its output layer. Views, casts, a
constant bias, scaling and soft-capping are recorded. `F.cross_entropy` of the result is computed by
`kernels.cross_entropy`. Every other operator computes the values first, so that code which reads logits gets what it
always got. Gradients are exact on both ways: the tensor has a node in the autograd graph, whose backward is that of the
linear layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from piledriver.engine.errors import EngineError
from piledriver.engine.torch_private import attribute_access, make_wrapper, without_torch_function
from piledriver.kernels.cross_entropy import chunked_cross_entropy

aten = torch.ops.aten
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
_waiting: weakref.WeakSet[Product] = weakref.WeakSet()


class Product:
    """hidden @ weight.T + bias, not computed yet; shared by all tensors that are derived from it."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.read = False
        """Whether the values exist. They may then have been changed in place: nothing is taken from `hidden`."""
        self.consumed = False
        """Whether a loss was computed without the values."""
        self.stale = False
        """Whether an optimizer has stepped since."""
        self._versions = self._seen_versions()
        self._values: Tensor | None = None
        _waiting.add(self)

    def values(self) -> Tensor:
        """Return the logits, computed once. Below autograd."""
        if self._values is None:
            self.check_fresh()
            self.read = True
            weight = self.weight.detach().to(self.hidden.dtype)
            bias = None if self.bias is None else self.bias.detach().to(self.hidden.dtype)
            with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
                self._values = F.linear(self.hidden.detach(), weight, bias)
        return self._values

    def check_fresh(self) -> None:
        """Reject a late read: the weights that these logits belong to no longer exist."""
        if self.stale or self._versions != self._seen_versions():
            raise EngineError(
                "these logits were not read before the weights changed, and they were not kept",
                fix="read them before optimizer.step(), or use Layout(fuse=False)",
            )

    def _seen_versions(self) -> tuple[int, ...]:
        return tuple(
            t._version for t in (self.hidden, self.weight, self.bias) if t is not None and not t.is_inference()
        )


def mark_stale(*_: Any) -> None:
    """Note that weights change now (a hook before every optimizer step)."""
    for product in _waiting:
        product.stale = True
    _waiting.clear()


@dataclass(frozen=True)
class View:
    """How a tensor derives from the product: which rows, the vocabulary's dim, cap * tanh(scale * (logit + bias))."""

    rows: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...] = ()
    """What was done to the dims before the vocabulary; the same is done to `hidden`."""
    transposed: bool = False
    """Whether the vocabulary is dim 1 of 3."""
    bias: Tensor | None = None
    """[vocabulary]: what was added to the product."""
    scale: float = 1.0
    capped: bool = False
    cap: float = 1.0


class LazyLogits(Tensor):
    """See the module. `product` and `view` say what it stands for; `chain` how to compute it from the product."""

    product: Product
    view_of_product: View
    chain: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]
    shape_only: Tensor

    @staticmethod
    def make(product: Product, view: View, chain: tuple[Any, ...], shape_only: Tensor) -> LazyLogits:
        """Return one; `shape_only` is a meta tensor of its shape, strides and dtype."""
        made: LazyLogits = make_wrapper(LazyLogits, shape_only, product.hidden.device)
        made.product, made.view_of_product, made.chain, made.shape_only = product, view, chain, shape_only
        return made

    def values(self) -> Tensor:
        """Return the values, without autograd."""
        found = self.product.values()
        for func, args, kwargs in self.chain:
            found = func(found, *args, **kwargs)
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            loss = _cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        elif func in _NEEDS_STORAGE:
            args = tree_map(lambda one: _plain(one) if isinstance(one, LazyLogits) else one, args)
        elif func is Tensor.register_hook and _is_gather_hook(args[1]) and args[0].product.hidden.requires_grad:
            # It gathers sharded parameters and changes no gradient. A loss without logits reaches `hidden` only.
            args[0].product.hidden.register_hook(args[1])
        elif func in _GRADIENT_ACCESS:
            _read_gradient(args[0], late=func in _GRADIENT_HOOKS)
        with without_torch_function():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and not first.product.read and func in _RECORDED:
            view = _RECORDED[func](first, *args[1:], **kwargs)
            if view is not None:
                chain = (*first.chain, (func, args[1:], kwargs))
                shapes = tree_map(lambda one: one.to("meta") if isinstance(one, Tensor) else one, args[1:])
                return LazyLogits.make(first.product, view, chain, func(first.shape_only, *shapes, **kwargs))
        mutated = first if func._schema.is_mutable and isinstance(first, LazyLogits) else None
        plain = tree_map(lambda one: one.values() if isinstance(one, LazyLogits) else one, (args, kwargs))
        out = func(*plain[0], **plain[1])
        return out if mutated is None else mutated


def lazy_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return hidden @ weight.T + bias as `LazyLogits`, in the dtype of `hidden`."""
    out: Tensor = _LazyLinear.apply(hidden, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _LazyLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        shape = torch.empty((*hidden.shape[:-1], weight.shape[0]), dtype=hidden.dtype, device="meta")
        return LazyLogits.make(Product(hidden, weight, bias), View(), (), shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        by_hidden, by_weight, by_bias = ctx.needs_input_grad
        gradient = gradient.to(hidden.dtype)
        rows = gradient.flatten(0, -2)
        return (
            gradient @ weight.to(hidden.dtype) if by_hidden else None,
            (rows.t() @ hidden.flatten(0, -2)).to(weight.dtype) if by_weight else None,
            rows.sum(0).to(ctx.bias_dtype) if by_bias else None,
        )


def _cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the loss without the logits; None where the plain way is needed."""
    usual = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not usual or reduction not in ("mean", "sum") or not isinstance(input, LazyLogits) or input.product.read:
        return None
    if isinstance(target, LazyLogits) or target.is_floating_point() or target.device != input.device:
        return None
    with without_torch_function():
        shape, dtype, differentiable, leaf = input.shape, input.dtype, input.requires_grad, input.is_leaf
    expected = (shape[0], *shape[2:]) if len(shape) == (3 if input.view_of_product.transposed else 2) else None
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.float32
    if expected is None or tuple(target.shape) != expected or (differentiable and leaf):
        return None
    return _loss_of_rows(input, target, dtype, ignore_index, reduction, differentiable)


def _loss_of_rows(
    input: LazyLogits, target: Tensor, dtype: torch.dtype, ignore_index: int, reduction: str, differentiable: bool
) -> Tensor:
    product, view = input.product, input.view_of_product
    product.check_fresh()
    product.consumed = True
    grad = torch.set_grad_enabled(torch.is_grad_enabled() and differentiable)
    with grad, torch.autocast(product.hidden.device.type, enabled=False):
        rows = product.hidden
        for func, args in view.rows:
            rows = func(rows, *args)
        rows, weight = rows.flatten(0, -2), product.weight
        factor = view.scale * view.cap if view.capped else view.scale
        bias = view.bias if product.bias is None else product.bias
        if bias is not None:
            rows, weight = with_bias_column(rows, weight, bias)
        if factor != 1.0:
            rows = rows * factor
        total, _, _ = chunked_cross_entropy(
            rows, weight, target.flatten(), ignore_index=ignore_index, softcap=view.cap if view.capped else None
        )
        if reduction == "mean":
            total = total / (target != ignore_index).sum()
    return total.to(dtype)


def with_bias_column(rows: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows with a one and a weight with the bias as one more column, padded to a width that is aligned."""
    one = F.pad(rows.new_ones(rows.shape[0], 1), (0, 7))
    return torch.cat((rows, one), dim=1), torch.cat((weight, F.pad(bias.unsqueeze(1).to(weight.dtype), (0, 7))), dim=1)


def _plain(logits: LazyLogits) -> Tensor:
    """Return the values as a plain tensor with its place in the graph."""
    with without_torch_function():
        return cast(Tensor, aten.alias.default(logits))


def _is_gather_hook(hook: Any) -> bool:
    """Return whether `fully_shard` registered a hook, on the outputs of a module, to gather its parameters."""
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")


def _read_gradient(logits: Any, *, late: bool) -> None:
    """Note that code wants to see or change the gradient of the logits: a loss must then pass through them."""
    if not isinstance(logits, LazyLogits):
        return
    with without_torch_function():
        differentiable = logits.requires_grad
    if logits.product.consumed and differentiable:
        if not late:
            return
        raise EngineError(
            "the gradient of logits was asked for after the loss was computed without them",
            fix="ask before the loss is computed, or use Layout(fuse=False)",
        )
    logits.product.values()


# What is recorded: functions of the tensor and the arguments of an operator that return the new view, or None.


def _cast(logits: LazyLogits, **options: Any) -> View | None:
    moved = options.get("device") not in (None, logits.product.hidden.device) or options.get("pin_memory")
    return None if moved or options.get("dtype", logits.shape_only.dtype) not in _FLOATS else logits.view_of_product


def _same(logits: LazyLogits, **_: Any) -> View | None:
    return logits.view_of_product


def _reshape(logits: LazyLogits, size: list[int]) -> View | None:
    view, shape = logits.view_of_product, logits.shape_only.shape
    rows = logits.shape_only.numel() // shape[-1]
    if view.transposed or not size or (size[-1] != shape[-1] and not (size[-1] == -1 and _fits(size, rows))):
        return None
    dims = tuple(size[:-1])
    return replace(view, rows=(*view.rows, (_reshape_rows, (dims,)))) if dims else None


def _fits(size: list[int], rows: int) -> bool:
    product = 1
    for one in size[:-1]:
        product *= one
    return product == rows


def _reshape_rows(rows: Tensor, dims: tuple[int, ...]) -> Tensor:
    return rows.reshape(*dims, rows.shape[-1])


def _slice(logits: LazyLogits, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> View | None:
    view, ndim = logits.view_of_product, logits.shape_only.ndim
    if view.transposed:
        return None
    if dim % ndim == ndim - 1:
        whole = start in (None, 0) and (end is None or end >= logits.shape_only.shape[-1]) and step == 1
        return view if whole else None
    return replace(view, rows=(*view.rows, (aten.slice.Tensor, (dim % ndim, start, end, step))))


def _transpose(logits: LazyLogits, first: int, second: int) -> View | None:
    view = logits.view_of_product
    swaps = logits.shape_only.ndim == 3 and {first % 3, second % 3} == {1, 2}
    return replace(view, transposed=not view.transposed) if swaps else None


def _permute(logits: LazyLogits, dims: list[int]) -> View | None:
    swaps = logits.shape_only.ndim == 3 and [dim % 3 for dim in dims] == [0, 2, 1]
    view = logits.view_of_product
    return replace(view, transposed=not view.transposed) if swaps else None


def _multiply(logits: LazyLogits, factor: Any) -> View | None:
    view = logits.view_of_product
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor == 0:
        return None
    return replace(view, cap=view.cap * factor) if view.capped else replace(view, scale=view.scale * factor)


def _divide(logits: LazyLogits, divisor: Any) -> View | None:
    number = not isinstance(divisor, bool) and isinstance(divisor, int | float) and divisor != 0
    return _multiply(logits, 1.0 / divisor) if number else None


def _add(logits: LazyLogits, other: Any, alpha: Any = 1) -> View | None:
    """A bias without a gradient (BART's): its own node in the graph is left out."""
    view, vocabulary = logits.view_of_product, logits.shape_only.shape[-1]
    if not isinstance(other, Tensor) or isinstance(other, LazyLogits) or other.requires_grad or alpha != 1:
        return None
    row = other.ndim > 0 and other.shape[-1] == other.numel() == vocabulary and other.ndim <= logits.shape_only.ndim
    plain = not view.transposed and not view.capped and view.scale == 1.0 and logits.product.bias is None
    if not row or not plain or other.dtype not in _FLOATS or other.device != logits.product.hidden.device:
        return None
    new = other.detach().flatten().clone()
    return replace(view, bias=new if view.bias is None else view.bias + new)


def _tanh(logits: LazyLogits) -> View | None:
    view = logits.view_of_product
    return None if view.capped else replace(view, capped=True)


_RECORDED: dict[Any, Callable[..., View | None]] = {
    aten._to_copy.default: _cast,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.slice.Tensor: _slice,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.mul.Tensor: _multiply,
    aten.div.Tensor: _divide,
    aten.tanh.default: _tanh,
    aten.add.Tensor: _add,
}
_NEEDS_STORAGE: frozenset[Any] = frozenset(
    {
        *(Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.numpy, Tensor.tolist, Tensor.__array__),
        *(Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.share_memory_),
        Tensor.__dlpack__,
    }
)
_GRADIENT_HOOKS: frozenset[Any] = frozenset(
    {Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_, Tensor.register_post_accumulate_grad_hook}
)
_GRADIENT_ACCESS: frozenset[Any] = _GRADIENT_HOOKS | {
    attribute_access("data", "__get__"),
    attribute_access("data", "__set__"),
    attribute_access("grad_fn", "__get__"),
    attribute_access("requires_grad", "__set__"),
}
