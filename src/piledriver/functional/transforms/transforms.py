"""Derivatives, batching and compilation of pure functions over trees.

Each takes a function or a module; an unbound module stands for its `apply`, a function of `(variables, *args)`.

`value_and_grad` has two engines with one meaning. On its own it uses ordinary autograd, which is the cheapest and
takes DTensors; inside another transform or a compiled graph it uses `torch.func`, which nests. So there are two ways
to compile a step: `jit(value_and_grad(f))` is one graph of everything, `value_and_grad(jit(f))` is a forward and a
backward graph with activations chosen by torch's min-cut partitioner.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from piledriver.core.errors import PiledriverError
from piledriver.functional.call_args import stand_in
from piledriver.functional.errors import TransformError
from piledriver.functional.module import Module
from piledriver.functional.torch_private import fake_tensor_mode
from piledriver.functional.transforms.donation import donated_leaves, donating
from piledriver.functional.transforms.lift import Remat
from piledriver.functional.transforms.remat import recomputed
from piledriver.functional.transforms.tracing import counted, gradient_depth, inside_functorch, one_more_gradient
from piledriver.functional.tree import Tree, leaves_of, rebuild

Argnums = int | tuple[int, ...]
_compiled_so_far = itertools.count()


def as_function(function: Any) -> Callable[..., Any]:
    """Return the function itself, or an unbound module's `apply`."""
    if isinstance(function, Module) and function._frame is None:
        return function.apply
    if not callable(function):
        raise TransformError(f"cannot transform a {type(function).__name__}", fix="pass a function or a module")
    return function  # type: ignore[no-any-return]


def grad(function: Any, argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes gradients with respect to arguments (trees); `(grads, aux)` with aux."""
    both = value_and_grad(function, argnums, has_aux)

    @functools.wraps(as_function(function))
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


def value_and_grad(function: Any, argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes `(value, grads)`, or `((value, aux), grads)` with `has_aux`.

    >>> value_and_grad(lambda tree: (tree["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
    (tensor(5.), {'w': tensor([2., 4.])})
    """
    plain = as_function(function)

    @functools.wraps(plain)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or inside_functorch():
            return _by_functorch(plain, argnums, has_aux, args, kwargs)
        return _by_autograd(plain, argnums, has_aux, args, kwargs)

    return wrapped


def _by_functorch(
    function: Callable[..., Any], argnums: Argnums, has_aux: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    chosen = argnums if isinstance(argnums, int) else tuple(argnums)
    aside: list[Any] = []

    def on_tensors(*args: Any, **kwargs: Any) -> Any:
        value, aux = function(*args, **kwargs)
        leaves = [] if aux is None else leaves_of(aux)
        aside.append((aux, leaves))
        return value, [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    inner = on_tensors if has_aux else function
    grads, value = counted("gradient", torch.func.grad_and_value(inner, chosen, has_aux))(*args, **kwargs)
    if not has_aux:
        return value, grads
    # `torch.func` accepts only tensors as aux: other values (a count, a name) bypass it.
    (aux, leaves), tensors = aside[0], iter(value[1])
    filled = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return (value[0], rebuild(aux, filled) if leaves else aux), grads


def _by_autograd(
    function: Callable[..., Any], argnums: Argnums, has_aux: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    chosen = (argnums,) if isinstance(argnums, int) else argnums
    if not all(-len(args) <= i < len(args) for i in chosen):
        raise TransformError(
            f"argnums {argnums} with {len(args)} arguments by position",
            fix="count from 0, and pass the differentiated arguments by position",
        )
    depth = gradient_depth()  # an inner gradient must leave a graph for the outer one
    leaves, structure = pytree.tree_flatten(tuple(args[i] for i in chosen))
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            what = f"a tensor of {leaf.dtype}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise TransformError(f"cannot differentiate with respect to {what}", fix="choose other argnums")
    with one_more_gradient(), torch.enable_grad():
        # Nested, the leaves stay in the outer graph; outermost, they are detached.
        fresh = [one.view_as(one) if depth and one.requires_grad else one.detach().requires_grad_() for one in leaves]
        filled = list(args)
        for i, tree in zip(chosen, pytree.tree_unflatten(fresh, structure), strict=True):
            filled[i] = tree
        value, aux = _value_and_aux(function(*filled, **kwargs), has_aux)
        found = _gradients(value, fresh, create_graph=depth > 0)
    grads = pytree.tree_unflatten(found, structure)
    if not depth:
        value, aux = pytree.tree_map_only(Tensor, Tensor.detach, (value, aux))
    picked = grads[0] if isinstance(argnums, int) else grads
    return ((value, aux) if has_aux else value), picked


def _value_and_aux(output: Any, has_aux: bool) -> tuple[Tensor, Any]:
    """Return what a differentiated function returned; anything but one number (and aux) is an error."""
    if has_aux and not (isinstance(output, tuple) and len(output) == 2):
        raise TransformError(f"has_aux=True, but the function returns a {type(output).__name__}", fix="return a pair")
    value, aux = output if has_aux else (output, None)
    if not isinstance(value, Tensor) or value.ndim or value.is_complex():
        shape = tuple(value.shape) if isinstance(value, Tensor) and value.ndim else getattr(value, "dtype", None)
        beside = ", or say has_aux=True" if isinstance(value, tuple) else ""
        raise TransformError(
            f"grad of a function that returns {shape or type(value).__name__}",
            fix=f"return one number: take the mean{beside}",
        )
    return value, aux


def _gradients(value: Tensor, inputs: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
    if not value.requires_grad:
        return [torch.zeros_like(one) for one in inputs]
    found = torch.autograd.grad(value, inputs, create_graph=create_graph, allow_unused=True)
    return [
        torch.zeros_like(one) if grad is None else _redistributed(one, grad)
        for one, grad in zip(inputs, found, strict=True)
    ]


def _redistributed(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Redistribute the gradient to the parameter's placements, so that the update is not left `Partial`."""
    placements = getattr(parameter, "placements", None)
    if placements is None or not hasattr(gradient, "placements") or any(one.is_partial() for one in placements):
        return gradient
    placed: Tensor = gradient.redistribute(parameter.device_mesh, placements)  # type: ignore[attr-defined]
    return placed


def vmap(function: Any, in_axes: Any = 0, out_axes: Any = 0, chunk_size: int | None = None) -> Callable[..., Any]:
    """Map over a dimension of the arguments; `in_axes` is a number, None, or a tree of them, which may end early.

    Arguments by name go to every call as they are.

    >>> params = Tree({"w": torch.ones(3, 2), "b": torch.ones(2)})
    >>> vmap(lambda p: p["w"] * p["b"], in_axes=({"w": 0, "b": None},))(params).shape
    torch.Size([3, 2])
    """
    plain = as_function(function)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        axes = _axes_as_trees(in_axes, args) if isinstance(in_axes, tuple) else in_axes
        mapped = torch.func.vmap(plain, in_dims=axes, out_dims=out_axes, chunk_size=chunk_size)
        return counted("batch", mapped)(*args, **kwargs)

    return functools.wraps(plain)(wrapped)


def _axes_as_trees(axes: Any, value: Any) -> Any:
    """Return the axes with a `Tree` wherever the value has one: users write dicts."""
    if isinstance(axes, tuple) and isinstance(value, tuple) and len(axes) == len(value):
        return tuple(_axes_as_trees(one, below) for one, below in zip(axes, value, strict=True))
    if not isinstance(axes, dict) or not isinstance(value, Tree):
        return axes
    if set(axes) != set(value):
        raise TransformError(
            f"in_axes has the names {', '.join(sorted(axes))} where the argument has {', '.join(value)}",
            fix="give each of them an axis, or None",
        )
    return Tree({name: _axes_as_trees(axes[name], below) for name, below in value.items()})


def jvp(function: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the value and its derivative along the tangents (forward mode)."""
    value, derivative = counted("tangent", torch.func.jvp)(as_function(function), primals, tangents)[:2]
    return value, derivative


def vjp(function: Any, *primals: Any, has_aux: bool = False) -> Any:
    """Return the value and a function from cotangents to gradients (reverse mode)."""
    return counted("gradient", torch.func.vjp)(as_function(function), *primals, has_aux=has_aux)


def remat(function: Any) -> Any:
    """Return a function or module that is recomputed in the backward pass instead of keeping its intermediate values.

    Gradients flow to the arguments only; a module's variables are among them.
    """
    return Remat(function) if isinstance(function, Module) else recomputed(as_function(function))


def jit(
    function: Any = None,
    *,
    donate: bool = False,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    backend: str = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a pure function over trees. Pass steps and keys as tensors; a plain number compiles once per value.

    With `donate` the first result is written into the first argument's memory; both must have the same structure
    (`state, loss = step(state, batch)`): no second copy of parameters and moments. What comes back is the tree that was
    passed, with the new numbers in it, which other references to that tree see too.

    `@jit` and `@jit(donate=True)` both decorate.
    """
    if function is None:
        return functools.partial(
            jit, donate=donate, fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options
        )
    plain = as_function(function)
    if getattr(plain, "__func__", None) is Module.init:
        raise TransformError("jit of `init`", fix="call it as it is: it infers shapes and makes each value once")
    whole = donating(plain) if donate else plain
    alone = _with_code_of_its_own(whole)
    compiled = torch.compile(alone, fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        inputs = (donated_leaves(args), *args) if donate else args
        try:
            output = compiled(*inputs, **kwargs)
        except Exception as error:
            if type(error).__module__.startswith("torch._dynamo"):
                _raise_own_error(whole, inputs, kwargs)
            raise
        if not donate:
            return output
        return args[0] if output is None else (args[0], *output)

    return functools.wraps(plain)(wrapped)


def _raise_own_error(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise the error that the function itself raises on stand-ins; the compiler's error would hide it."""
    try:
        eval_shape(function, *args, **kwargs)
    except PiledriverError as error:
        raise error from None
    except Exception:  # not a mistake that we know: the compiler's message stands
        pass


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under a code object of its own, by which the compiler keeps graphs and their limits.

    All gradients of all functions are one code object, so without this they would share these.
    """

    def entry(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    entry.__code__ = entry.__code__.replace(co_name=f"jit_{next(_compiled_so_far)}")
    return entry


def eval_shape(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a function returns for these arguments, on the meta device, without computing."""
    with fake_tensor_mode() as mode, torch.no_grad():
        fake_args, fake_kwargs = pytree.tree_map_only(Tensor, functools.partial(stand_in, mode), (args, kwargs))
        output = as_function(function)(*fake_args, **fake_kwargs)
    return pytree.tree_map_only(Tensor, lambda one: torch.empty(one.shape, dtype=one.dtype, device="meta"), output)
